// Snapshot: saves a training, so that it can resume where it was, to the bit, after a kill, a crash or a preemption.
//
//   int64_t seen = 0;
//   muster::Snapshot snapshot({.folder = "run1", .every = 100});
//   snapshot.add("model", net).add("optimizer", sgd).add("sampler", sampler).add("seen", seen);
//   for (int64_t step = snapshot.restore(); step < steps; ++step) {
//     …                                             // one step of the training
//     if (snapshot.step(step + 1)) return 0;        // a stop was requested, and all ranks have saved
//   }
//
// Contents: everything that was added, and torch's default CPU generator. An item is either *shared*, that is, the same
// on all ranks and stored once (the default for modules and optimizers, which data-parallel training keeps equal), or
// *per rank* and stored for each rank (the default for everything else). `.per_rank` of add() overrides the default.
// You choose the names; they must be the same on all ranks, and each may occur once. An item may be a tree of what can
// be added: `add("gan", gan)` adds "gan.0", "gan.1", …, or "gan.generator" if it is a map.
//
// A model of FullyShardedDataParallel and its optimizer are shared as well: each rank stores what it owns, and
// restore() gives it what it owns then. Two optimizers are stored per rank: one over owned_parameters(), and one that
// is not torch's SGD, Adam, AdamW, RMSprop or Adagrad.
//
// Shared items can be restored by another number of ranks, on other hosts, and with another way of training: what
// FullyShardedDataParallel has saved, DistributedDataParallel or a single process restores, and the reverse. Per-rank
// items need the same number of ranks. The default generator is an exception: it is not restored then, with a warning.
//
// Storage: rank 0 gathers the per-rank items and writes one file, `step-<n>.snapshot.safetensors`. With `.sharded` each
// rank writes its own file (shared tensors are distributed by size); when all files are durable, rank 0 writes a small
// manifest of the same name, which makes them the snapshot. `.shard_folders` distributes these files over disks. Every
// file is complete or absent: it is written under another name, synced, and renamed. The newest two snapshots are kept;
// for a moment the disk holds three. docs/snapshots.md has the format.
//
// restore() takes the newest snapshot whose every byte matches its checksums *on all ranks*. It refuses a truncated or
// corrupted one, with file, tensor and byte in a warning, and tries the one before it. On one host each rank reads what
// it needs. On several hosts a rank reads the file that it wrote, or if it does not find that, another rank that does;
// and sends the others what they need of it. So the folder may be on a shared file system, or on each host's own disk
// if rank 0 stays on its host.
// The files are read twice, to verify them and into the tensors where the values stay, so restoring needs no memory for
// them. restore() checks names, shapes and dtypes before it changes anything. Objects that read themselves (`load()`)
// come next, and may still refuse; then optimizers, which are put back if one refuses; tensors, numbers and generators
// come last, when nothing has been refused on any rank.
//
// Asynchronous: with `.asynchronous`, step() and save() return when this rank has copied its part of the state, for
// which it needs as much memory again, and a thread writes it while the training goes on. The next save waits for the
// one before it. What goes wrong surfaces there, or at wait(), on all ranks. A stop is always saved before step()
// returns. Until a snapshot is written, a crash leaves the one before it. The destructor waits.
//
// In the hosts' memory: with `.local`, step() also saves into a folder that each host has for itself, in memory
// ("/dev/shm/run1") or on its own disk, and more often. Each rank writes its shard there, and sends it to ranks on
// other hosts (`.replicas`). So after the loss of a host the others have all of the newest snapshot. restore() takes
// the newest one of both folders. A snapshot in `.folder` replaces those of the hosts that are not newer. save(), and a
// stop, save in `.folder`. What the hosts have may be lost with them: if none of it is complete, and `.folder` has none
// either, restore() warns and returns 0.
//
// SIGTERM: while a Snapshot exists, the signal requests a stop and does not end the process: the handler sets a flag,
// the ranks agree at the next boundary (step() or stop_here()), all save, and that call returns true on every rank, no
// matter which rank got the signal. Further SIGTERMs change nothing (schedulers and launchers each send one). When the
// last Snapshot of the process is destroyed, the previous signal disposition is restored; it is not called in between.
// A StopSignal (stop_signal.h) that is made first in main() covers the time before a Snapshot, and between two.
// `muster run` kills ranks --stop-grace (5 s) after the signal, so work that takes longer than that needs a boundary in
// it.
//
// Parts: add() what is wanted, and restore({.strict = false}). What only the snapshot has is left out, and what only
// the program has keeps its value: whole items ("ema"), and parameters and buffers of a module. Rank 0 lists both. So a
// training can go on after you have added an item, and a new one can begin with the layers of another. Shapes and
// dtypes must be equal, too. restore({.steps = 300}) and restore({.best = true}) take that snapshot and no other.
//
// Collective: restore(), step(), stop_here(), save() and wait(), by all ranks of `.group`, with equal steps. step() and
// stop_here() cost one all_reduce of 24 bytes; a world of one needs none.
//
// Errors: those of collectives, and
//   InvalidArgument  a name occurs twice; a score that is not finite; an item differs from that in the snapshot (the
//                    message names the tensor, with both shapes), or is per rank and of another number of ranks; the
//                    snapshot is of another `.training`; save() into a folder with snapshots that restore() has not
//                    examined; restore(), if another rank's folder has newer snapshots than rank 0's
//   Mismatch         ranks are at different steps, have added different items, or restore with different options
//   CorruptError     restore() found snapshots, and refused all of them
//   Unavailable      another job has its snapshots in the folder now: from restore() and save(). Or the snapshot cannot
//                    be written: from save(), and from step() if a stop was requested. A periodic save of step() that
//                    fails is only reported; the training goes on, and the old snapshots stay.
// Every rank throws the same error.
//
// Thread-safety: none; only the training's thread may use it, but any thread may call request_stop() and
// stop_requested(). Items must outlive the Snapshot. Ranks that are threads share one default generator; they cannot
// resume it to the bit.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "muster/checkpoint/snapshot_tree.h"
#include "muster/comm/group.h"

namespace muster {

struct LocalSnapshotOptions {
  std::filesystem::path folder;  // on each host; empty: none
  int64_t every = 0;             // steps between snapshots
  int keep = 1;                  // number of newest snapshots to keep; for a moment there is one more
  int replicas = 1;              // of each shard, on as many other hosts; fewer if there are fewer
};

struct SnapshotOptions {
  std::filesystem::path folder;  // made if it does not exist; for one job, and one training
  // The name of the training, equal on all ranks. restore() refuses a snapshot that another name was saved with. Empty:
  // it is not checked.
  std::string training = {};
  int64_t every = 0;     // steps between snapshots; 0: only on request
  bool sharded = false;  // one file per rank instead of one by rank 0
  // With .sharded: folders for the ranks' files, such as one on each disk. Rank r writes into number r modulo how many
  // there are, and .folder gets a link to the file. Empty: the files are in .folder.
  std::vector<std::filesystem::path> shard_folders = {};
  bool asynchronous = false;   // step() and save() copy the state, and a thread writes it
  int keep = 2;                // number of newest snapshots to keep; 1 or more
  int keep_best = 0;           // and number of those with the best scores
  LocalSnapshotOptions local;  // in the hosts' memory, or on their own disks
  bool on_sigterm = true;
  bool default_generator = true;         // saves torch's CPU generator, as the item "default generator"
  Group group;                           // default: all ranks
  std::chrono::milliseconds timeout{0};  // for waits while another rank writes or reads; 0: the World's timeout
};

struct SnapshotRestoreOptions {
  // false: the snapshot and what was added may have different items, and modules different parameters and buffers.
  bool strict = true;
  // The snapshot of this number of steps, or the one with the best score, which rank 0 knows; neither: the newest one.
  // If a newer one exists, this Snapshot cannot save any more, not even at a stop: a training that goes on from an
  // older one needs a folder of its own.
  std::optional<int64_t> steps = {};
  bool best = false;
};

struct SnapshotItemOptions {
  std::optional<bool> per_rank;  // default: see above
};

class Snapshot;
namespace detail {
void save_in_place(Snapshot& snapshot);                                           // checkpoint.h
int64_t restore_only(Snapshot& snapshot, const SnapshotRestoreOptions& options);  // the same
}  // namespace detail

class Snapshot {
 public:
  // InvalidArgument: no folder; every, keep or replicas out of range; .local.every without .local.folder or the
  // reverse; both folders are the same. Unavailable: a folder cannot be made.
  explicit Snapshot(SnapshotOptions options);
  Snapshot(Snapshot&&) noexcept;
  Snapshot& operator=(Snapshot&&) noexcept;
  ~Snapshot();

  // Parameters and buffers. restore() copies into them, so objects that share them (an optimizer, DDP) see the values.
  Snapshot& add(std::string name, torch::nn::Module& module, SnapshotItemOptions options = {});
  template <typename Contained>
  Snapshot& add(std::string name, const torch::nn::ModuleHolder<Contained>& module, SnapshotItemOptions options = {}) {
    return add(std::move(name), static_cast<torch::nn::Module&>(*module.ptr()), options);
  }
  template <std::derived_from<torch::nn::Module> Module>
  Snapshot& add(std::string name, const std::shared_ptr<Module>& module, SnapshotItemOptions options = {}) {
    return add(std::move(name), static_cast<torch::nn::Module&>(*module), options);
  }
  // State and options (learning rates too) of any optimizer that has save() and load(); all of torch's have. It must
  // have been made for the same parameters in the same order.
  Snapshot& add(std::string name, torch::optim::Optimizer& optimizer, SnapshotItemOptions options = {});
  Snapshot& add(std::string name, at::Generator& generator, SnapshotItemOptions options = {});
  Snapshot& add(std::string name, at::Tensor& tensor, SnapshotItemOptions options = {});  // restore() copies into it
  template <detail::SnapshotNumber T>  // an integer, a bool, a float or a double
  Snapshot& add(std::string name, T& number, SnapshotItemOptions options = {}) {
    return add_number(std::move(name), &number, detail::dtype_of<T>(), options);
  }
  Snapshot& add(std::string name, std::string& string, SnapshotItemOptions options = {});
  Snapshot& add(std::string name, std::map<std::string, int64_t>& numbers, SnapshotItemOptions options = {});
  Snapshot& add(std::string name, std::map<std::string, double>& numbers, SnapshotItemOptions options = {});
  // Your class may save tensors, numbers, strings, lists of numbers or of tensors, and tuples, in archives nested to
  // any depth.
  template <Archivable T>
  requires(!std::derived_from<T, torch::nn::Module> &&
           !std::derived_from<T, torch::optim::Optimizer>) Snapshot& add(std::string name, T& item,
                                                                         SnapshotItemOptions options = {}) {
    return add_archivable(
        std::move(name), [&item](torch::serialize::OutputArchive& archive) { item.save(archive); },
        [&item](torch::serialize::InputArchive& archive) { item.load(archive); }, options);
  }

  // A tree: a vector, deque, list, array, pair, tuple, map or torch::OrderedDict of what may be added, of trees, or of
  // pointers to either, and a struct with a member `auto tree() { return std::tie(generator, discriminator); }`. Each
  // leaf is an item of its own, with the default for its type: its name is the tree's, a dot and its key or its
  // position. The tree must have the same leaves when the snapshot is restored, and none of them may move before the
  // Snapshot ends. InvalidArgument: a pointer or an optional in it is empty.
  template <detail::SnapshotBranch Tree>
  Snapshot& add(const std::string& name, Tree& tree, SnapshotItemOptions options = {}) {
    detail::for_each_snapshot_item(name, tree, [&](const std::string& item, auto& leaf) { add(item, leaf, options); });
    return *this;
  }

  // Restores the newest good snapshot. Returns the number that step() or save() was given, with which the training goes
  // on; 0 if there is no snapshot. `options` must be the same on all ranks. InvalidArgument, too: there is no such
  // snapshot; nothing of what was added, or of a module that was, is in the snapshot. CorruptError, too: the one that
  // was named is not intact.
  int64_t restore(const SnapshotRestoreOptions& options = {});

  // Call it at the end of each step; `steps`: how many are done, 1 after the first. Saves if `.every` or a request to
  // stop says so. Returns true if this or another rank was asked to stop, and all have saved; then leave the loop and
  // end with status 0. Rank 0 has printed on standard error how to go on.
  [[nodiscard]] bool step(int64_t steps);

  // Call it at a boundary other than the end of a step: before the first step, between epochs, between the batches of
  // an evaluation. `steps`: how many are done, 0 or more. As step(), but saves only if this or another rank was asked
  // to stop, and does not save if `steps` is 0. All ranks must call it equally often: mind evaluations with unequal
  // parts. The next run goes on after the last step and repeats what the program did since then, so nothing that was
  // added may have changed since the last step.
  [[nodiscard]] bool stop_here(int64_t steps);

  // Saves now, or begins to.
  void save(int64_t steps);

  // How good the model of the next snapshot in .folder is; larger is better. Rank 0's counts. For .keep_best: the best
  // ones stay, beside the newest ones; restore() takes the newest.
  void score(double value);
  // The steps of the snapshots in the folder with the best scores, the best first. Not collective.
  std::vector<int64_t> best() const;

  // Until the asynchronous save that is under way, if any, is on the disk. Throws what went wrong. Collective.
  void wait();

  // Has the effect of a SIGTERM to this rank: the next step() or stop_here() of all ranks saves and returns true.
  void request_stop() noexcept;
  // Whether this rank was asked to stop. Not collective: ranks may see it at different times. Use it, for example, to
  // leave a long evaluation.
  bool stop_requested() const noexcept;

 private:
  Snapshot& add_number(std::string name, void* number, at::ScalarType dtype, SnapshotItemOptions options);
  Snapshot& add_archivable(std::string name, std::function<void(torch::serialize::OutputArchive&)> save,
                           std::function<void(torch::serialize::InputArchive&)> load, SnapshotItemOptions options);

  friend void detail::save_in_place(Snapshot& snapshot);
  friend int64_t detail::restore_only(Snapshot& snapshot, const SnapshotRestoreOptions& options);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
