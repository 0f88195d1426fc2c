// All ranks together write a snapshot, in two parts: collect() finds what each rank has to write, and write() writes
// it, perhaps in another thread and from copies, while the training goes on.
//
// In one file: every rank sends its own entries to rank 0, which writes the file. Sharded: every rank writes its own
// entries and its part of the shared ones, and reports that to rank 0, which then writes the manifest. In both cases,
// the snapshot exists as soon as rank 0 has renamed its file. Older snapshots are removed only after that.
//
// In folders of the hosts' own, always sharded: when each rank has written its shard, it sends it to the ranks that
// keep replicas; when all have written those, the first rank of each host writes the manifest; when all have written
// that, they remove older snapshots. If one cannot, all remove the new one.
//
// Thread-safety: none; collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "checkpoint/entry.h"
#include "checkpoint/problem.h"
#include "checkpoint/snapshot_place.h"

namespace muster::checkpoint {

struct SaveOptions {
  int64_t steps = 0;
  bool sharded = false;
  int keep = 2;
  int keep_best = 0;                 // of those with a score, beside the newest
  std::optional<double> score = {};  // of this snapshot
  std::string training = {};
};

struct Collected {
  Problem of_all;       // the same on all ranks
  Problem problem;      // of this rank
  uint64_t layout = 0;  // a checksum of what must be the same on all ranks
  Entries own;          // in one file: what this rank sends to rank 0. Sharded: its shard
  Entries shared;       // in one file, on rank 0: what no rank sends
};
// Collective. The tensors may be those of the training.
Collected collect(const SnapshotPlace& here, Items& items, bool sharded);
// Gives it tensors of its own. `copies` keeps them, so that the next ones need no new memory; until then they must stay
// as they are.
using Copies = std::map<std::string, at::Tensor>;
void take_copies(Collected& collected, Copies& copies);
// Collective. Returns what went wrong, the same on all ranks. If something did, the older snapshots are still there,
// and the new one may be there, too: if all was written and only the last sync failed. Errors of collectives are
// thrown.
Problem write(SnapshotPlace& here, const Collected& collected, const SaveOptions& options);

// Not collective: removes from the hosts' own folders, on the ranks that care for them, snapshots that are not newer
// than one in the folder of all.
void remove_up_to(SnapshotPlace& of_hosts, int64_t steps);

// Tells the user who has asked to stop, on standard error, which step is saved and how to go on; or, before the first
// step, that there is nothing to save.
void say_stopped(int rank, int64_t steps, const std::filesystem::path& folder);

}  // namespace muster::checkpoint
