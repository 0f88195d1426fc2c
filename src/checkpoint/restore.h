// Reading the newest snapshot that is whole, by all ranks together.
//
// Rank 0 names the candidates, the newest first. Each rank reads and verifies the file that it wrote (in one file: rank
// 0), the ranks tell each other, and only what is whole for all is used; its shared parts are then broadcast by those
// who have them. All items are checked against it before any is changed.
//
// Thread-safety: none; collective.
#pragma once

#include <cstdint>
#include <set>

#include "checkpoint/job.h"

namespace muster::checkpoint {

struct Restored {
  int64_t steps = 0;          // 0: there is none
  std::set<int64_t> refused;  // newer ones that are of no use
};

// Throws the same on all ranks: Corrupt where there are only refused ones, InvalidArgument where it does not fit.
Restored restore(Job& job, const Items& items);

}  // namespace muster::checkpoint
