// The table of all contexts (muster/autograd/context.h) that a worker knows, and what workers tell each other of them.
//
// A context's id names its creator. Every call that is made in it carries the id; a worker that gets the first one has
// a part of the context (context_state.h) from then on. When the context ends, its creator tells the workers that it
// has called in it, and these tell the workers that they have called. A worker that has been told drops its part, and
// remembers the id for a while to refuse calls that come late.
//
// A lost worker may have died before it told others that a context has ended. So when a worker is lost, every creator
// tells all workers which of its contexts live; they drop the rest, and refuse later calls in those (of the lost
// worker). Nobody knows which workers the lost one had called in the living contexts, so when these end, their creator
// tells all workers. Contexts whose creator is lost end everywhere.
//
// Thread-safety: all methods and functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autograd/passes/context_state.h"
#include "muster/base/deadline.h"
#include "muster/rpc/future.h"
#include "rpc/agent/agent.h"

namespace muster::autograd {

constexpr uint64_t context_id(int creator, uint64_t count) { return static_cast<uint64_t>(creator) << 46 | count; }
constexpr int creator_of_context(uint64_t id) { return static_cast<int>(id >> 46); }

class Contexts {
 public:
  explicit Contexts(rpc::Agent& agent);

  std::shared_ptr<ContextState> begin();
  std::shared_ptr<ContextState> find(uint64_t id);  // makes this worker's part if needed. Aborted if it has ended
  void check(uint64_t id) const;                    // of a context that was found here. Aborted if it has ended
  std::set<int> end(uint64_t id);                   // returns the workers that must be told
  // Ends the contexts of the lost worker. Returns this worker's own that live, and the next id; when these end,
  // `others` are told too.
  std::pair<std::vector<uint64_t>, uint64_t> lost(int worker, const std::set<int>& others);
  // Drops those contexts of that creator that are below `next` and not among `living`.
  void keep_only(int creator, const std::vector<uint64_t>& living, uint64_t next);
  void close();
  size_t size() const;

 private:
  void remember(uint64_t id);
  // What a creator last said about its contexts.
  struct Known {
    std::set<uint64_t> living;
    uint64_t next = 0;
    bool has_ended(uint64_t id) const { return id < next && !living.contains(id); }
  };

  rpc::Agent& agent_;
  mutable std::mutex mutex_;
  uint64_t next_ = 1;
  std::unordered_map<uint64_t, std::shared_ptr<ContextState>> table_;
  std::set<uint64_t> ended_;  // the contexts that ended last
  std::deque<uint64_t> ended_order_;
  std::unordered_map<int, Known> known_;
};

// Tells these workers that a context has ended. Each answers when all workers that it has called in the context have
// dropped it too. The calls are made outside of any context. Those that cannot be made until the deadline, because the
// worker has too many calls to answer, are replaced by messages without an answer.
struct Told {
  std::vector<rpc::Future<void>> answers;
  bool all_answer = true;
};
Told end_on(rpc::Agent& agent, uint64_t id, const std::set<int>& workers, Deadline deadline = Deadline::never());
// Sends a worker which contexts of this one live.
void tell_living_contexts(rpc::Agent& agent, int worker, const std::vector<uint64_t>& living, uint64_t next);

// The context that Context::Scope has made this thread's, or else that of the call which this thread serves; null if
// there is none.
std::shared_ptr<ContextState> current_context();

}  // namespace muster::autograd
