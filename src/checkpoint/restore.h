// All ranks together read the newest snapshot that is intact.
//
// Rank 0 names the candidates, the newest first. Each rank reads and verifies its file (reading.h). The ranks exchange the results and the files' directories, and use the snapshot only if it is
// intact on all of them. Then each entry goes to the ranks that need it, from the one that has read it: first what an item
// needs in one piece; then all items are checked; last come the tensors of modules and the states of optimizers, a few
// megabytes at a time. So a rank needs memory for the files that it reads, and not for what others need.
//
// Thread-safety: none; collective.
#pragma once

#include <cstdint>
#include <set>

#include "checkpoint/snapshot_place.h"

namespace muster::checkpoint {

struct Restored {
  int64_t steps = 0;          // 0: there is none
  std::set<int64_t> refused;  // newer snapshots that are damaged
};

// Throws the same on all ranks: CorruptError if there are snapshots and all of them are refused, InvalidArgument if the
// snapshot does not fit the items.
Restored restore(SnapshotPlace& here, Items& items);

}  // namespace muster::checkpoint
