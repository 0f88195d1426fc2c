#include "autograd/passes/sub_graph.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <utility>

#include "autograd/passes/pass.h"
#include "muster/base/error.h"

namespace muster::autograd {

void NodeCounts::add(const Nodes& nodes) {
  const std::lock_guard lock(mutex_);
  uncounted_.insert(&nodes);
  ++graphs_;
}

bool NodeCounts::any_is_shared(const Nodes& nodes) {
  const std::lock_guard lock(mutex_);
  if (graphs_ == 1) return false;
  for (const Nodes* const graph : uncounted_)
    for (const Node* const node : *graph) ++counts_[node];
  uncounted_.clear();
  return std::any_of(nodes.begin(), nodes.end(), [this](const Node* node) { return counts_.at(node) > 1; });
}

std::vector<Node*> NodeCounts::remove(const Nodes& nodes) {
  std::vector<Node*> last;
  const std::lock_guard lock(mutex_);
  --graphs_;
  if (uncounted_.erase(&nodes) > 0) return last;
  for (Node* const node : nodes) {
    const auto found = counts_.find(node);
    if (--found->second > 0) continue;
    counts_.erase(found);
    last.push_back(node);
  }
  return last;
}

SubGraph::SubGraph(edge_list results, std::vector<PtrTo<ReceiveNode>> slots, std::vector<Node*> nodes,
                   std::shared_ptr<NodeCounts> counts, std::shared_ptr<void> counted)
    : results_(std::move(results)),
      slots_(std::move(slots)),
      nodes_(std::make_unique<const NodeCounts::Nodes>(std::move(nodes))),
      counts_(std::move(counts)),
      counted_(std::move(counted)) {
  counts_->add(*nodes_);
}

SubGraph::~SubGraph() {
  if (nodes_) counts_->remove(*nodes_);
}

std::vector<Tensor> SubGraph::backward(std::vector<Tensor> gradients, std::vector<uint8_t> wanted, bool accumulate,
                                       bool keep_graph) {
  edge_list results;
  std::vector<PtrTo<ReceiveNode>> slots;
  std::unique_ptr<const NodeCounts::Nodes> used_up;
  bool is_shared = false;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kEnded) throw Aborted("the context of this call has ended");
    TORCH_CHECK(state_ == State::kThere, torch::autograd::ERR_BACKWARD_TWICE);
    if (gradients.size() != results_.size() || wanted.size() != slots_.size())
      throw InvalidArgument("backward: the number of gradients or slots does not fit this call");
    // A used graph is kept here while the caller waits. The caller's node learns from the answer that it is used up,
    // and then releases it.
    results = results_;
    slots = slots_;
    if (!keep_graph) {
      state_ = State::kUsed;
      is_shared = counts_->any_is_shared(*nodes_);
      used_up.swap(nodes_);
    }
  }
  Pass pass{.leaves = accumulate ? Leaves::kAccumulate : Leaves::kNone,
            .slots = &slots,
            .keep_graph = keep_graph || is_shared,
            .create_graph = at::GradMode::is_enabled()};
  const auto release = [&] {
    if (!used_up) return;
    for (Node* const node : counts_->remove(*used_up))
      if (is_shared) {
        node->will_release_variables();
        node->release_variables();
      }
  };
  variable_list answers;
  try {
    enter_context_of_call(pass);
    answers = run(pass, results, gradients, &wanted);
  } catch (...) {
    release();
    throw;
  }
  release();
  for (Tensor& one : answers) one = sendable(std::move(one));
  return answers;
}

void SubGraph::end() {
  edge_list results;  // destroyed without the lock
  std::vector<PtrTo<ReceiveNode>> slots;
  const std::lock_guard lock(mutex_);
  if (nodes_) counts_->remove(*nodes_);
  nodes_ = nullptr;
  results.swap(results_);
  slots.swap(slots_);
  state_ = State::kEnded;
}

}  // namespace muster::autograd
