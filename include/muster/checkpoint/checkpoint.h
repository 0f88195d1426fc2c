// checkpoint::save() and load(): a state in a folder, saved and loaded by one call.
//
//   auto state = std::tie(net, adamw, schedule, epoch);
//   muster::checkpoint::save(state, "checkpoints/epoch-3");
//   muster::checkpoint::load(state, "checkpoints/epoch-3");
//
// A state is anything that Snapshot::add() takes: a module, an optimizer, a schedule, a scaler, a sampler, a generator,
// a tensor, a number, a string, a class with save() and load(), or a tree of them (a tuple, a vector, a map, a struct
// with `tree()`, to any depth). Both are a Snapshot with one item, "state", so snapshot.h says what is shared by the
// ranks, which other numbers of ranks can load it, how a file or folder appears completely or not at all, and what a
// damaged one is refused for. The files are safetensors files, and `muster checkpoint` reads them.
//
// A folder holds one checkpoint. save() replaces the one that is there, whatever state it is of, or damaged, when the
// new one is complete on the disk. It refuses a folder that has the snapshots of a training. Any number of jobs may
// load from one folder at the same time, but none while another saves there. For snapshots every so many steps, a stop
// by SIGTERM, the best ones or asynchronous saving, use a Snapshot.
//
// Errors: those of Snapshot::save() and restore(), the same on all ranks; InvalidArgument, too, from save() if the
// folder has the snapshots of a training, and from load() if it has no checkpoint. Collective, for the ranks of
// `.group`: they must call it with equal options. Thread-safety: as Snapshot.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>

#include "muster/checkpoint/snapshot.h"

namespace muster {

struct CheckpointOptions {
  bool sharded = false;                  // each rank writes a file of its own; as SnapshotOptions
  std::optional<bool> per_rank = {};     // of all that is in the state; as SnapshotItemOptions
  bool strict = true;                    // load(): as SnapshotRestoreOptions
  Group group = {};                      // default: all ranks
  std::chrono::milliseconds timeout{0};  // for waits while another rank writes or reads; 0: the World's timeout
};

namespace detail {

SnapshotOptions options_of_checkpoint(const std::filesystem::path& folder, const CheckpointOptions& options);
void load_newest(Snapshot& snapshot, const std::filesystem::path& folder, const CheckpointOptions& options);

}  // namespace detail

namespace checkpoint {

// Saves the state in place of what is in the folder, which is made if it does not exist.
template <typename State>
void save(State&& state, const std::filesystem::path& folder, const CheckpointOptions& options = {}) {
  Snapshot snapshot(detail::options_of_checkpoint(folder, options));
  snapshot.add("state", state, {.per_rank = options.per_rank});
  detail::save_in_place(snapshot);
}

// Copies what was saved into the state. Nothing changes if it is not intact or does not fit.
template <typename State>
void load(State&& state, const std::filesystem::path& folder, const CheckpointOptions& options = {}) {
  Snapshot snapshot(detail::options_of_checkpoint(folder, options));
  snapshot.add("state", state, {.per_rank = options.per_rank});
  detail::load_newest(snapshot, folder, options);
}

}  // namespace checkpoint
}  // namespace muster
