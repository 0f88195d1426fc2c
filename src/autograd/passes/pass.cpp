#include "autograd/passes/pass.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <unordered_map>
#include <utility>

#include "autograd/graph/ordered_sums.h"
#include "autograd/graph/small_graph.h"
#include "autograd/passes/context.h"
#include "autograd/passes/receive_node.h"
#include "autograd/passes/tape.h"

namespace muster::autograd {
namespace {

namespace engine = torch::autograd;

class SinkNode final : public Node {
 public:
  SinkNode() : Node(uint64_t{0}) { add_input_metadata(undefined_input()); }
  variable_list apply(variable_list&&) override { return {}; }
  std::string name() const override { return "MusterSink"; }
};

struct Passes {
  std::mutex mutex;
  std::unordered_map<int, Pass*> by_task;
};
Passes& passes() {
  static auto* const all = new Passes;
  return *all;
}

// With the lock. Null if we did not start the task, or if there is none (-1).
Pass* pass_of(int task) {
  const auto it = passes().by_task.find(task);
  return it == passes().by_task.end() ? nullptr : it->second;
}

// The root of a pass. Its gradients are all defined.
class SeedNode final : public Node {
 public:
  SeedNode(Pass& pass, const edge_list& roots, const variable_list& gradients)
      : Node(UINT64_MAX, edge_list(roots)), pass_(pass) {
    for (const Tensor& gradient : gradients) add_input_metadata(gradient);
  }

  variable_list apply(variable_list&& gradients) override {
    leave_nothing_if_this_run_fails();
    task_ = engine::get_current_graph_task_id();
    const std::lock_guard lock(passes().mutex);
    passes().by_task[task_] = &pass_;
    return std::move(gradients);
  }
  std::string name() const override { return "MusterSeed"; }
  void forget() {
    const std::lock_guard lock(passes().mutex);
    passes().by_task.erase(task_);
  }

 private:
  Pass& pass_;
  int task_ = -1;
};

// Runs the engine to drop what this thread's queue still holds of failed runs: all of it comes before the run's own
// node, which has the lowest sequence number.
void drop_what_has_not_run() {
  class LastNode final : public Node {
   public:
    explicit LastNode(const Tensor& like) : Node(uint64_t{0}) { add_input_metadata(like); }
    variable_list apply(variable_list&&) override { return {}; }
    std::string name() const override { return "MusterLast"; }
  };
  const Tensor gradient = at::zeros({});
  engine::Engine::get_default_engine().execute({Edge(make_node<LastNode>(gradient), 0)}, {gradient}, false, false, true,
                                               {});
}

variable_list execute(Pass& pass, const edge_list& roots, const variable_list& gradients, const edge_list& outputs) {
  const auto seed = make_node<SeedNode>(pass, roots, gradients);
  edge_list seeds;
  for (uint32_t i = 0; i < gradients.size(); ++i) seeds.emplace_back(seed, i);
  struct Forget {
    SeedNode& seed;
    ~Forget() { seed.forget(); }
  } const forget{*seed};
  try {
    return engine::Engine::get_default_engine().execute(seeds, gradients, pass.keep_graph, pass.create_graph,
                                                        outputs.empty(), outputs);
  } catch (...) {
    drop_what_has_not_run();  // in this thread: the run's own callback may be destroyed in a thread of libtorch
    throw;
  }
}

// The nodes that a walk has come to.
class Seen {
 public:
  bool add(const Node* node) {  // false: it is there already
    if (many_.empty()) {
      const auto end = few_.begin() + static_cast<ptrdiff_t>(count_);
      if (std::find(few_.begin(), end, node) != end) return false;
      if (count_ < few_.size()) {
        few_[count_++] = node;
        return true;
      }
      many_.insert(few_.begin(), few_.end());
    }
    return many_.insert(node).second;
  }

 private:
  std::array<const Node*, 16> few_{};  // most graphs have no more
  size_t count_ = 0;
  ska::flat_hash_set<const Node*> many_;  // a graph of inner steps has thousands
};

using Leaf = engine::AccumulateGrad*;

std::vector<Leaf> leaves_among(const std::vector<Node*>& nodes) {
  std::vector<Leaf> leaves;
  for (Node* const node : nodes)
    if (auto* const leaf = dynamic_cast<engine::AccumulateGrad*>(node)) leaves.push_back(leaf);
  return leaves;
}

// Whether the pass takes the leaves' gradients, and libtorch's own nodes for them do not run. If `leaves` have hooks
// that need these nodes, they run.
bool takes_gradients(Pass& pass, const std::vector<Leaf>& leaves) {
  if (pass.leaves == Leaves::kOrdered &&
      !std::all_of(leaves.begin(), leaves.end(), [](const Leaf leaf) { return OrderedSums::can_add_to(*leaf); }))
    pass.leaves = Leaves::kAccumulate;
  return pass.leaves != Leaves::kAccumulate;
}

void take_gradients(Pass& pass, const std::vector<Leaf>& leaves, variable_list gradients) {
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!gradients[i].defined()) continue;
    if (pass.leaves == Leaves::kContext)
      pass.context->add(pass.path, i, leaves[i]->variable, gradients[i]);
    else
      pass.sums->add(pass.path, i, *leaves[i], std::move(gradients[i]));
  }
}

void run_in_engine(Pass& pass, const edge_list& roots, const variable_list& gradients) {
  std::vector<Leaf> leaves;
  if (pass.leaves != Leaves::kAccumulate) leaves = leaves_among(reachable(roots));
  if (!takes_gradients(pass, leaves)) {
    execute(pass, roots, gradients, {});
    return;
  }
  edge_list outputs;
  for (const Leaf leaf : leaves) outputs.emplace_back(leaf->getptr(), 0);
  outputs.push_back(sink());
  take_gradients(pass, leaves, execute(pass, roots, gradients, outputs));
}

// Runs the pass without the engine, if its graph allows that; returns whether it did.
bool run_small(Pass& pass, const edge_list& roots, const variable_list& gradients) {
  if (pass.create_graph) return false;
  const auto is_end = [&](Node& node) {
    const auto* const receive = dynamic_cast<ReceiveNode*>(&node);
    return receive ? pass.collects.contains(receive) : &node == sink().function.get();
  };
  auto graph = SmallGraph::of(roots, is_end);
  if (!graph) return false;
  std::vector<Leaf> leaves;
  if (pass.leaves != Leaves::kAccumulate) leaves = leaves_among(graph->nodes());
  if (!takes_gradients(pass, leaves)) leaves.clear();
  variable_list captured(leaves.size());
  graph->run(roots, gradients, pass.keep_graph, [&](Node& node, variable_list& inputs) {
    if (const auto* const receive = dynamic_cast<ReceiveNode*>(&node)) {
      if (inputs[0].defined()) pass.collected[receive] = std::move(inputs[0]);
      return true;
    }
    const auto leaf = std::find(leaves.begin(), leaves.end(), &node);
    if (leaf == leaves.end()) return &node == sink().function.get();
    captured[static_cast<size_t>(leaf - leaves.begin())] = std::move(inputs[0]);
    return true;
  });
  take_gradients(pass, leaves, std::move(captured));
  return true;
}

}  // namespace

Tensor on_host(const Tensor& like) {
  const at::NoGradGuard no_grad;
  return at::zeros({}, at::TensorOptions(like.scalar_type()).device(at::kCPU)).expand(like.sizes());
}

const Edge& sink() {
  static const auto* const edge = new Edge(make_node<SinkNode>(), 0);
  return *edge;
}

void leave_nothing_if_this_run_fails() {
  // Held by the run's callbacks, which libtorch calls if all nodes have run. libtorch destroys the callbacks, and
  // everything of the run except the queue, in the thread that began the run, when that has left the engine; or in one
  // of its device threads, if that holds the last reference.
  struct AtTheEnd {
    bool succeeded = false;
    ~AtTheEnd() {
      if (succeeded) return;
      try {
        drop_what_has_not_run();
      } catch (const std::exception&) {
        // The thread's next run drops it.
      }
    }
  };
  thread_local int last = -1;  // the numbers of tasks are not reused
  const int task = engine::get_current_graph_task_id();
  if (std::exchange(last, task) == task) return;
  engine::Engine::get_default_engine().queue_callback([end = std::make_shared<AtTheEnd>()] { end->succeeded = true; });
}

std::vector<Node*> reachable(const edge_list& edges, size_t most, const std::vector<const Node*>& stops) {
  std::vector<Node*> found, ahead;
  Seen seen;
  const auto visit = [&](const edge_list& next) {
    for (const Edge& edge : next)
      if (edge.is_valid() && seen.add(edge.function.get())) ahead.push_back(edge.function.get());
  };
  visit(edges);
  while (!ahead.empty() && found.size() <= most) {
    Node* const node = ahead.back();
    ahead.pop_back();
    found.push_back(node);
    if (std::find(stops.begin(), stops.end(), node) == stops.end()) visit(node->next_edges());
  }
  return found;
}

Pass* current_pass() {
  const std::lock_guard lock(passes().mutex);
  return pass_of(engine::get_current_graph_task_id());
}

Run current_run() {
  Run run{.accumulates = true,
          .keeps_graph = engine::get_current_graph_task_keep_graph(),
          .context = nullptr,
          .task = engine::get_current_graph_task_id()};
  // With the lock: if another node throws, the pass may end while this one runs in a thread of a device.
  const std::lock_guard lock(passes().mutex);
  if (const Pass* const pass = pass_of(run.task)) {
    run.accumulates = pass->leaves != Leaves::kNone;
    run.context = pass->context;
  } else if (const auto* const wanted = engine::get_current_graph_task_exec_info()) {
    run.accumulates = wanted->empty();
  }
  return run;
}

void enter_context_of_call(Pass& pass) {
  const auto call = std::static_pointer_cast<rpc::IncomingCall>(rpc::detail::current_call());
  if (!call) return;
  const auto received = current_received();
  if (received && received->context) {
    pass.context = received->context;
    pass.path = received->path;
    if (pass.leaves == Leaves::kAccumulate) pass.leaves = Leaves::kContext;
  } else if (pass.leaves == Leaves::kAccumulate && !pass.create_graph &&
             at::globalContext().deterministicAlgorithms()) {
    pass.leaves = Leaves::kOrdered;
    pass.sums = &tape_of(*call->agent).sums();
    pass.path = received ? received->path : Path();
    if (pass.path.empty()) {  // the caller has not set deterministic algorithms: the order of its calls
      const auto number = call->header.call;
      pass.path = {static_cast<uint32_t>(call->caller), static_cast<uint32_t>(number >> 32),
                   static_cast<uint32_t>(number)};
    }
  }
}

variable_list run(Pass& pass, const edge_list& roots, const variable_list& gradients,
                  const std::vector<uint8_t>* wanted) {
  edge_list from;
  variable_list with;
  for (size_t i = 0; i < roots.size(); ++i) {
    if (!roots[i].is_valid() || !gradients[i].defined()) continue;
    from.push_back(roots[i]);
    with.push_back(placed(gradients[i], roots[i]));
  }
  variable_list results(pass.slots ? pass.slots->size() : 0);
  if (from.empty()) return results;

  if (pass.slots)
    for (const auto& slot : *pass.slots) pass.collects.insert(slot.get());
  const auto is_wanted = [&](size_t slot) { return !wanted || (*wanted)[slot] != 0; };
  if (pass.leaves == Leaves::kNone) {
    edge_list outputs;
    std::vector<size_t> places;
    for (size_t slot = 0; slot < results.size(); ++slot) {
      if (!is_wanted(slot)) continue;
      places.push_back(slot);
      outputs.emplace_back((*pass.slots)[slot], 0);
    }
    if (outputs.empty()) return results;
    const variable_list captured = execute(pass, from, with, outputs);
    for (size_t i = 0; i < places.size(); ++i) results[places[i]] = captured[i];
    return results;
  }
  if (!run_small(pass, from, with)) run_in_engine(pass, from, with);
  for (size_t slot = 0; slot < results.size(); ++slot) {
    const auto it = pass.collected.find((*pass.slots)[slot].get());
    if (it != pass.collected.end() && is_wanted(slot)) results[slot] = it->second;
  }
  return results;
}

}  // namespace muster::autograd
