// Writing a snapshot, by all ranks together.
//
// In one file: every rank sends rank 0 what is per rank, rank 0 writes. Sharded: every rank writes its own entries and
// those of the shared ones that fall to it, and says so; then rank 0 writes the manifest. Either way the snapshot is
// there when rank 0's rename has happened, and only after that are older ones removed.
//
// Thread-safety: none; collective.
#pragma once

#include <cstdint>
#include <filesystem>
#include <set>

#include "checkpoint/job.h"
#include "checkpoint/problem.h"

namespace muster::checkpoint {

struct SaveOptions {
  int64_t steps = 0;
  bool sharded = false;
  int keep = 2;
  std::set<int64_t> refused;  // snapshots that are of no use, to be removed
};

// What went wrong, the same on all ranks; then the snapshots that were there still are, and the new one may be, where
// all was written and only the last sync failed. Errors of collectives are thrown.
Problem save(Job& job, const Items& items, const SaveOptions& options);

// Says on standard error, for the user whose wish to stop was granted, what is saved and how to go on; or that before
// the first step there was nothing to save.
void say_stopped(int rank, int64_t steps, const std::filesystem::path& folder);

}  // namespace muster::checkpoint
