// A worker's part of a context (muster/autograd/context.h), and the table of all that it has.
//
// A context's id names its creator. Every call that is made in it carries the id; a worker that gets the first has its
// part from then on. When the context ends, its creator tells whom it has called in it, and these tell theirs. Who has
// been told, and has let go, remembers the id for a while: calls that come late are refused.
//
// If a worker is lost, it may have died before it told others: every creator then tells all workers which of its
// contexts live, and they let go of the rest, and refuse calls in these that the lost worker made and that come later.
// Nobody knows whom it had called in those that live: when they end, their creator tells all workers. Those of a
// creator that is lost end everywhere.
//
// Thread-safety: all methods.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autograd/node.h"
#include "autograd/path.h"
#include "autograd/sweep.h"
#include "muster/autograd/context.h"
#include "rpc/agent.h"

namespace muster::autograd {

class SubGraph;

constexpr uint64_t context_id(int creator, uint64_t count) { return static_cast<uint64_t>(creator) << 46 | count; }
constexpr int creator_of_context(uint64_t id) { return static_cast<int>(id >> 46); }

class ContextState {
 public:
  ContextState(uint64_t id, rpc::Agent& agent) : id_(id), agent_(&agent), alive_(agent.weak_from_this()) {}

  uint64_t id() const { return id_; }
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  void check() const;  // Aborted if it has ended
  // Aborted: it is of a time of RPC that is over, or of another World.
  void check_agent(const rpc::Agent& agent) const;
  std::shared_ptr<rpc::Agent> agent() const { return alive_.lock(); }
  uint32_t next() { return next_.fetch_add(1, std::memory_order_relaxed); }  // call of this worker's own

  void calls(int worker);                            // a call in it is going there. Aborted if it has ended
  void also_tell(const std::set<int>& workers);      // when it ends: as if they had been called
  void add(const std::shared_ptr<SubGraph>& graph);  // Aborted if it has ended
  void add(const Path& path, size_t position, const Tensor& leaf, Tensor gradient);
  std::vector<Gradient> gradients() const;  // in the order of the paths
  Tensor gradient(const Tensor& leaf) const;
  // As gradient() of each, but the context's own where that is one part: they must not be changed.
  std::vector<Tensor> lend_gradients(at::TensorList leaves) const;

  // Lets go of everything. Gives whom it has called, the first time.
  std::set<int> end();

 private:
  using Key = std::pair<Path, size_t>;
  struct Leaf {
    Tensor leaf;
    std::map<Key, Tensor> parts;
    Tensor sum() const;  // nobody else's
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

class Contexts {
 public:
  explicit Contexts(rpc::Agent& agent);

  std::shared_ptr<ContextState> begin();
  std::shared_ptr<ContextState> find(uint64_t id);  // makes this worker's part. Aborted if it has ended
  std::set<int> end(uint64_t id);                   // whom to tell
  // Ends those of the lost worker. Gives this worker's own that live, and the next id; when these end, the others are
  // told too.
  std::pair<std::vector<uint64_t>, uint64_t> lost(int worker, const std::set<int>& others);
  // Of that creator: lets go of those below `next` that are not among `living`.
  void keep_only(int creator, const std::vector<uint64_t>& living, uint64_t next);
  void close();
  size_t size() const;

 private:
  void remember(uint64_t id);
  // Of a creator, at its last word.
  struct Known {
    std::set<uint64_t> living;
    uint64_t next = 0;
    bool has_ended(uint64_t id) const { return id < next && !living.contains(id); }
  };

  rpc::Agent& agent_;
  mutable std::mutex mutex_;
  uint64_t next_ = 1;
  std::unordered_map<uint64_t, std::shared_ptr<ContextState>> table_;
  std::set<uint64_t> ended_;  // the last of them
  std::deque<uint64_t> ended_order_;
  std::unordered_map<int, Known> known_;
};

// Sends a worker which contexts of this one live.
void tell_living_contexts(rpc::Agent& agent, int worker, const std::vector<uint64_t>& living, uint64_t next);

// That of the call which this thread serves, or that which Context::Scope has made this thread's; null: none.
std::shared_ptr<ContextState> current_context();

}  // namespace muster::autograd
