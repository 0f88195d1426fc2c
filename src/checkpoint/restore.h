// All ranks together read the newest snapshot that is intact.
//
// Rank 0 names the candidates in the folder of all; on each host the first rank names those in the host's own. They are
// tried from the newest on. The ranks open and verify its files (reading.h), and use the snapshot only if it is intact
// on all of them. Then each entry is read a second time, now into the memory of the ranks that need it (delivery.h):
// first what an item needs in one piece; then all items are checked; last come the tensors of modules and the states of
// optimizers. So no rank needs memory for a file, but for one tensor at a time that is not contiguous or not on the
// CPU, and for what other ranks need of the file that it reads. What is read the second time is verified again, and a
// file that has changed meanwhile is a CorruptError.
//
// Thread-safety: none; collective.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/snapshot_place.h"
#include "muster/checkpoint/snapshot.h"

namespace muster::checkpoint {

// Returns the steps of the snapshot; 0 if there is none. Notes which ones are refused, and that the folders are known.
// Throws the same on all ranks: CorruptError if there are snapshots and all of them are refused, InvalidArgument if the
// snapshot does not fit the items, is that of a training of another name, or is not there, Mismatch if the options
// differ. `of_hosts`: the hosts' own folders; null if there are none. `training`: its name; empty: any.
// `best`: the steps of those with the best scores, the best first; called on rank 0.
int64_t restore(SnapshotPlace& here, SnapshotPlace* of_hosts, Items& items, SnapshotRestoreOptions options,
                const std::string& training, const std::function<std::vector<int64_t>()>& best);

// The newest snapshot in the folder of all, 0 if there is none. After that save() may replace what is there.
// InvalidArgument if it is not of this training. Collective.
int64_t newest_to_replace(SnapshotPlace& here, const std::string& training);

}  // namespace muster::checkpoint
