#include "autograd/passes/receive_node.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <exception>
#include <utility>

#include "autograd/graph/arguments.h"
#include "autograd/passes/context.h"
#include "autograd/passes/pass.h"
#include "muster/rpc/call.h"
#include "rpc/api/call_on.h"
#include "rpc/objects/reference.h"

namespace muster::autograd {
namespace {

// The gradients that a task of the engine has found and that nobody has asked for: they are sent to their callers when
// the task ends.
struct Batch {
  std::shared_ptr<rpc::Agent> agent;
  bool keeps_graph = false, grad_mode = false;
  std::shared_ptr<ContextState> context;
  std::mutex mutex;
  std::map<int, std::vector<Returned>> by_worker;

  void send() {
    const at::AutoGradMode grad(grad_mode);
    const Context::Scope scope(context);
    std::vector<rpc::Future<void>> answers;
    std::exception_ptr first;
    const auto keep_error_of = [&](const auto& fn) {
      try {
        fn();
      } catch (...) {
        if (!first) first = std::current_exception();
      }
    };
    for (auto& [worker, gradients] : by_worker)
      keep_error_of([&, worker = worker, &gradients = gradients] {
        answers.push_back(
            rpc::detail::call_on<&continue_backward>(*agent, worker, std::move(gradients), bool(keeps_graph)));
      });
    // For all of them, so that none adds to a gradient when this backward() is over.
    for (auto& answer : answers) keep_error_of([&] { answer.get(); });
    if (first) std::rethrow_exception(first);
  }
};

struct Batches {
  std::mutex mutex;
  std::map<std::pair<int, const rpc::Agent*>, std::weak_ptr<Batch>>
      by_task;  // the engine's callback holds the batch: it is destroyed with the task

  std::shared_ptr<Batch> of_this_task(const std::shared_ptr<rpc::Agent>& agent) {
    const Run run = current_run();
    const std::lock_guard lock(mutex);
    std::erase_if(by_task, [](const auto& entry) { return entry.second.expired(); });
    const std::pair<int, const rpc::Agent*> key(run.task, agent.get());
    if (auto there = by_task[key].lock()) return there;
    const auto batch = std::make_shared<Batch>();
    batch->agent = agent;
    batch->keeps_graph = run.keeps_graph;
    batch->grad_mode = at::GradMode::is_enabled();
    batch->context = run.context ? run.context : current_context();
    by_task[key] = batch;
    torch::autograd::Engine::get_default_engine().queue_callback([batch] { batch->send(); });
    return batch;
  }
};

}  // namespace

ReceiveNode::ReceiveNode(std::shared_ptr<rpc::detail::Reference> arguments, Slot slot, const Tensor& like)
    : Node(uint64_t{0}, edge_list{sink()}), arguments_(std::move(arguments)), slot_(slot) {
  add_input_metadata(like);
}

variable_list ReceiveNode::apply(variable_list&& gradients) {
  leave_nothing_if_this_run_fails();
  if (!gradients[0].defined()) return variable_list(1);
  if (Pass* const pass = current_pass(); pass && pass->collects.contains(this)) {
    const std::lock_guard lock(pass->mutex);
    pass->collected[this] = std::move(gradients[0]);
    return variable_list(1);
  }
  // A user's backward() for given inputs: a received argument is not one of them.
  if (!current_run().accumulates) return variable_list(1);
  static auto* const batches = new Batches;
  const auto agent = arguments_->agent.lock();
  if (!agent) throw Aborted("a gradient belongs to another worker, and RPC has been shut down");
  const auto batch = batches->of_this_task(agent);
  const std::lock_guard lock(batch->mutex);
  batch->by_worker[slot_.owner].push_back(
      {.object = slot_.object, .index = slot_.index, .gradient = sendable(std::move(gradients[0]))});
  return variable_list(1);
}

HostNode::HostNode(Edge next, const Tensor& like) : Node(edge_list{std::move(next)}) { add_input_metadata(like); }

variable_list HostNode::apply(variable_list&& gradients) {
  gradients[0] = sendable(std::move(gradients[0]));
  return std::move(gradients);
}

Edge ReceiveNodes::edge_of(const std::shared_ptr<rpc::detail::Reference>& arguments, uint32_t index,
                           const Tensor& argument) {
  if (argument.is_cpu()) return {get(arguments, index, argument), 0};
  return {make_node<HostNode>(Edge(get(arguments, index, on_host(argument)), 0), argument), 0};
}

PtrTo<ReceiveNode> ReceiveNodes::get(const std::shared_ptr<rpc::detail::Reference>& arguments, uint32_t index,
                                     const Tensor& like) {
  const Slot slot{arguments->owner, arguments->object, index};
  const std::lock_guard lock(mutex_);
  sweep_(nodes_, [](const auto& entry) { return entry.second.expired(); });
  const auto it = nodes_.find(slot);
  if (it != nodes_.end())
    if (auto there = it->second.lock()) return there;
  auto node = make_node<ReceiveNode>(arguments, slot, like);
  nodes_.insert_or_assign(slot, WeakPtrTo<ReceiveNode>(node));
  return node;
}

void continue_backward(std::vector<Returned> gradients, bool keep_graph) {
  const auto agent = rpc::current_agent();
  Pass pass{.keep_graph = keep_graph, .create_graph = at::GradMode::is_enabled()};
  enter_context_of_call(pass);
  edge_list edges;
  variable_list values;
  for (Returned& one : gradients) {
    const auto arguments = find_arguments(*agent, one.object);
    if (!arguments || one.index >= arguments->edges.size())
      throw InvalidArgument("a gradient came for a call that this worker has not made");
    edges.push_back(arguments->edges[one.index]);
    values.push_back(std::move(one.gradient));
  }
  run(pass, edges, values);
}

}  // namespace muster::autograd
