// All ranks together write a snapshot.
//
// In one file: every rank sends its own entries to rank 0, which writes the file. Sharded: every rank writes its own
// entries and its part of the shared ones, and reports that to rank 0, which then writes the manifest. In both cases,
// the snapshot exists as soon as rank 0 has renamed its file. Older snapshots are removed only after that.
//
// Thread-safety: none; collective.
#pragma once

#include <cstdint>
#include <filesystem>
#include <set>

#include "checkpoint/problem.h"
#include "checkpoint/snapshot_place.h"

namespace muster::checkpoint {

struct SaveOptions {
  int64_t steps = 0;
  bool sharded = false;
  int keep = 2;
  std::set<int64_t> refused;  // damaged snapshots, to be removed
};

// Returns what went wrong, the same on all ranks. If something did, the older snapshots are still there, and the new
// one may be there, too: if all was written and only the last sync failed. Errors of collectives are thrown.
Problem save(SnapshotPlace& here, Items& items, const SaveOptions& options);

// Tells the user who has asked to stop, on standard error, which step is saved and how to go on; or, before the first
// step, that there is nothing to save.
void say_stopped(int rank, int64_t steps, const std::filesystem::path& folder);

}  // namespace muster::checkpoint
