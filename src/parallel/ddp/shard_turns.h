// A rank's shards side by side, for a net in which each shard needs the values of all others before it can go on: one
// with a synchronized batch norm.
//
// Each shard has a thread, and one of them runs at a time. In a round, one shard after the other has its turn. A turn
// ends where the shard waits for the others' values (`BatchPart::gather()`), or at the end of its function. Then the
// ranks tell each other how their turns have ended. If all shards wait, the calling thread gathers their values, and
// the next round begins.
//
// What a shard leaves behind in a process-wide generator, or in a buffer of the module, it finds again in its next
// turn: `begin_turn` and `end_turn` see to that.
//
// Errors, on all ranks or none: what a function throws (InvalidArgument on the other ranks, as throw_if_any_failed()
// says); InvalidArgument if shards differ in how often they wait, in which batch norm, or with how many values.
// Functions that wait then get Aborted from gather(), and have ended when compute_in_turns() returns.
// Thread-safety: one thread. The functions run with the caller's World and at::ThreadLocalState.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "muster/comm/group.h"
#include "parallel/modules/same_module.h"

namespace muster::ddp {

struct ShardWork {
  std::function<void(size_t index)> compute;               // in the shard's thread
  std::function<void(size_t index)> begin_turn, end_turn;  // in the calling thread
  const std::vector<parallel::NamedTensor>& tensors;       // the module's, which its batch norms are known by
};

// Every rank of the group calls it, with the same number of shards. `what`: of the message on other ranks.
void compute_in_turns(size_t shards, const Group& group, const ShardWork& work, const char* what);

// Throws the InvalidArgument for a batch norm of another module.
[[noreturn]] void refuse_norm();

}  // namespace muster::ddp
