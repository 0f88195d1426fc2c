#include "autograd/sub_graph.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <utility>

#include "autograd/pass.h"
#include "muster/base/error.h"

namespace muster::autograd {

void NodeCounts::add(const std::vector<Node*>& nodes) {
  const std::lock_guard lock(mutex_);
  for (const Node* const node : nodes) ++counts_[node];
}

bool NodeCounts::any_is_shared(const std::vector<Node*>& nodes) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(nodes.begin(), nodes.end(), [this](const Node* node) { return counts_.at(node) > 1; });
}

std::vector<Node*> NodeCounts::remove(const std::vector<Node*>& nodes) {
  std::vector<Node*> last;
  const std::lock_guard lock(mutex_);
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
      nodes_(std::move(nodes)),
      counts_(std::move(counts)),
      counted_(std::move(counted)) {
  counts_->add(nodes_);
}

SubGraph::~SubGraph() { counts_->remove(nodes_); }

std::vector<Tensor> SubGraph::backward(std::vector<Tensor> gradients, std::vector<uint8_t> wanted, bool accumulate,
                                       bool keep_graph) {
  edge_list results;
  std::vector<PtrTo<ReceiveNode>> slots;
  std::vector<Node*> used_up;
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
      is_shared = counts_->any_is_shared(nodes_);
      used_up.swap(nodes_);
    }
  }
  Pass pass{.leaves = accumulate ? Leaves::kAccumulate : Leaves::kNone,
            .slots = &slots,
            .keep_graph = keep_graph || is_shared,
            .create_graph = at::GradMode::is_enabled()};
  const auto release = [&] {
    for (Node* const node : counts_->remove(used_up))
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
  counts_->remove(nodes_);
  nodes_.clear();
  results.swap(results_);
  slots.swap(slots_);
  state_ = State::kEnded;
}

}  // namespace muster::autograd
