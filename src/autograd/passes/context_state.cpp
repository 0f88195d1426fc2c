// A worker's part of a context: the gradients that came, the sub-graphs in it, and the workers that it has called.
#include <algorithm>

#include "autograd/passes/context_state.h"
#include "autograd/passes/sub_graph.h"
#include "muster/base/error.h"

namespace muster::autograd {

void ContextState::check() const {
  if (ended()) throw Aborted("this autograd context has ended");
}

void ContextState::check_agent(const rpc::Agent& agent) const {
  if (agent_ != &agent)
    throw Aborted("this autograd context belongs to another World, or to RPC that has been shut down");
}

void ContextState::calls(int worker) {
  const std::lock_guard lock(mutex_);
  check();
  called_.insert(worker);
}

void ContextState::also_tell(const std::set<int>& workers) {
  const std::lock_guard lock(mutex_);
  if (!ended()) called_.insert(workers.begin(), workers.end());
}

void ContextState::add(const std::shared_ptr<SubGraph>& graph) {
  const std::lock_guard lock(mutex_);
  check();
  sweep_(graphs_, [](const auto& one) { return one.expired(); });
  graphs_.push_back(graph);
}

void ContextState::add(const Path& path, size_t position, const Tensor& leaf, Tensor gradient) {
  const std::lock_guard lock(mutex_);
  check();
  Leaf& there = leaves_[leaf.unsafeGetTensorImpl()];
  there.leaf = leaf;
  Tensor& part = there.parts[{path, position}];
  part = part.defined() ? part.add(gradient) : std::move(gradient);
}

std::vector<Gradient> ContextState::gradients() const {
  const std::lock_guard lock(mutex_);
  check();
  std::vector<const Leaf*> leaves;
  for (const auto& [impl, leaf] : leaves_) leaves.push_back(&leaf);
  std::sort(leaves.begin(), leaves.end(),
            [](const Leaf* a, const Leaf* b) { return a->parts.begin()->first < b->parts.begin()->first; });
  std::vector<Gradient> gradients;
  for (const Leaf* const leaf : leaves) gradients.push_back({leaf->leaf, sum_of(leaf->parts)});
  return gradients;
}

Tensor ContextState::gradient(const Tensor& leaf) const {
  const std::lock_guard lock(mutex_);
  check();
  const auto it = leaves_.find(leaf.unsafeGetTensorImpl());
  return it == leaves_.end() ? Tensor() : sum_of(it->second.parts);
}

std::vector<Tensor> ContextState::lend_gradients(at::TensorList leaves) const {
  std::vector<Tensor> all;
  all.reserve(leaves.size());
  const std::lock_guard lock(mutex_);
  check();
  for (const Tensor& leaf : leaves) {
    const auto it = leaves_.find(leaf.unsafeGetTensorImpl());
    if (it == leaves_.end()) {
      all.emplace_back();
    } else {
      const auto& parts = it->second.parts;
      all.push_back(parts.size() == 1 ? parts.begin()->second : sum_of(parts));
    }
  }
  return all;
}

std::set<int> ContextState::end() {
  std::vector<std::weak_ptr<SubGraph>> graphs;
  decltype(leaves_) leaves;
  std::set<int> called;
  {
    const std::lock_guard lock(mutex_);
    ended_.store(true, std::memory_order_release);
    graphs.swap(graphs_);
    leaves.swap(leaves_);
    called.swap(called_);
  }
  for (const auto& graph : graphs)
    if (const auto there = graph.lock()) there->end();
  return called;
}

}  // namespace muster::autograd
