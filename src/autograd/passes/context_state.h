// A worker's part of a context (muster/autograd/context.h). context.h has the table of all contexts that a worker
// knows.
//
// Thread-safety: all methods.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "autograd/graph/node.h"
#include "autograd/graph/path.h"
#include "autograd/graph/sweep.h"
#include "muster/autograd/context.h"
#include "rpc/agent/agent.h"

namespace muster::autograd {

class SubGraph;

class ContextState {
 public:
  ContextState(uint64_t id, rpc::Agent& agent) : id_(id), agent_(&agent), alive_(agent.weak_from_this()) {}

  uint64_t id() const { return id_; }
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  void check() const;  // Aborted if it has ended
  // Aborted if the context belongs to RPC that has been shut down, or to another World.
  void check_agent(const rpc::Agent& agent) const;
  std::shared_ptr<rpc::Agent> agent() const { return alive_.lock(); }
  uint32_t next() { return next_.fetch_add(1, std::memory_order_relaxed); }  // number of this worker's next call

  void calls(int worker);                            // notes a call to that worker. Aborted if it has ended
  void also_tell(const std::set<int>& workers);      // when it ends: as if they had been called
  void add(const std::shared_ptr<SubGraph>& graph);  // Aborted if it has ended
  void add(const Path& path, size_t position, const Tensor& leaf, Tensor gradient);
  std::vector<Gradient> gradients() const;  // in the order of the paths
  Tensor gradient(const Tensor& leaf) const;
  // As gradient() of each, but a gradient of one part is the context's own tensor: callers must not change them.
  std::vector<Tensor> lend_gradients(at::TensorList leaves) const;

  // Drops everything. Returns the workers that it has called; a second call returns none.
  std::set<int> end();

 private:
  struct Leaf {
    Tensor leaf;
    Parts parts;
  };
  const uint64_t id_;
  const rpc::Agent* const agent_;
  const std::weak_ptr<rpc::Agent> alive_;
  std::atomic<bool> ended_{false};
  std::atomic<uint32_t> next_{0};
  mutable std::mutex mutex_;
  std::set<int> called_;
  std::vector<std::weak_ptr<SubGraph>> graphs_;
  Sweep sweep_;
  std::unordered_map<const at::TensorImpl*, Leaf> leaves_;
};

}  // namespace muster::autograd
