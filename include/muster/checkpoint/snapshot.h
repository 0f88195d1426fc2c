// Snapshot: a training that goes on where it was, to the bit, after a kill, a crash or a preemption.
//
//   int64_t seen = 0;
//   muster::Snapshot snapshot({.folder = "run1", .every = 100});
//   snapshot.add("model", net).add("optimizer", sgd).add("sampler", sampler).add("seen", seen);
//   for (int64_t step = snapshot.restore(); step < steps; ++step) {
//     …                                             // one step of the training
//     if (snapshot.step(step + 1)) return 0;        // asked to stop, and saved
//   }
//
// What is in it: all that was added, and torch's default CPU generator. An item is either *shared*, the same on all
// ranks (modules and optimizers: data-parallel training keeps them equal), and stored once; or *per rank* (everything
// else), and stored for each. `.per_rank` of add() says otherwise. Names are yours; the same on all ranks, each once.
//
// How it is stored: rank 0 gathers what is per rank and writes one file, `step-<n>.snapshot`. With `.sharded` each rank
// writes a file of its own (shared tensors are dealt out by size) and rank 0, when all are durable, a small manifest
// of the same name, which makes them the snapshot. Every file is complete or not there: written beside its place,
// synced, renamed. The newest two are kept; for a moment the disk holds three. docs/snapshots.md has the format.
//
// What comes back: restore() takes the newest snapshot whose every byte is as its checksums say, *on all ranks*; one
// that is torn or flipped is refused with file, tensor and byte in a warning, and the one before it is tried. A rank
// reads only files that it wrote itself and the ranks pass on what is shared, so the folder may be on a shared file
// system or on each host's own disk. What does not fit by name, shape or dtype is found before anything changes;
// objects that read themselves (`load()`) are next, and may still refuse; tensors, numbers and generators come last.
//
// SIGTERM: while a Snapshot lives, the signal is a wish, not an end: the handler sets a flag, the ranks agree at the
// next boundary (step() or stop_here()), all save, and that returns true, whichever rank got the signal. Further
// SIGTERMs change nothing (schedulers and launchers each send one). The disposition that was there before is back when
// the last Snapshot of the process is gone; it is not called in between. A StopSignal (stop_signal.h) that is made
// first in main() covers what comes before a Snapshot, and between two. `muster run` kills ranks --stop-grace (5 s)
// after the signal, so what takes longer than that needs a boundary in it.
//
// Collective: restore(), step(), stop_here() and save(), by all ranks of `.group`, with equal steps. step() and
// stop_here() cost one all_reduce of 24 bytes; a world of one needs none.
//
// Errors: those of collectives, and
//   InvalidArgument  a name twice; an item that the snapshot has otherwise (the tensor is named, with both shapes), or
//                    of another number of ranks; save() into a folder with snapshots that restore() has not looked at
//   Mismatch         ranks that are at different steps or have added different things
//   Corrupt          restore() found snapshots, and refused all of them
//   Unavailable      another job has its snapshots in the folder now: from restore() and save(). Or it cannot be
//                    written: from save(), and from step() when asked to stop. A step() that saves because
//                    it is time only reports it, the training goes on, and the old snapshots stay.
// Every rank throws the same.
//
// Thread-safety: none; the thread of the training. request_stop() and stop_requested(), from any. Items must outlive
// the Snapshot. Ranks that are threads share one default generator; they cannot resume it to the bit.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
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

#include "muster/comm/group.h"

namespace muster {

struct SnapshotOptions {
  std::filesystem::path folder;  // made if it is not there; of one job, and of one training
  int64_t every = 0;             // steps between snapshots; 0: only on request
  bool sharded = false;          // a file a rank instead of one by rank 0
  int keep = 2;                  // snapshots; 1 or more
  bool on_sigterm = true;
  bool default_generator = true;         // torch's, of the CPU, as the item "default generator"
  Group group;                           // default: all ranks
  std::chrono::milliseconds timeout{0};  // for the others while one writes or reads; 0: the World's
};

struct SnapshotItemOptions {
  std::optional<bool> per_rank;  // default: false for modules and optimizers, true for all else
};

// Whatever can write itself to a torch archive and read itself back: optimizers, samplers, your own classes.
template <typename T>
concept Archivable = requires(T& item, torch::serialize::OutputArchive& out, torch::serialize::InputArchive& in) {
  item.save(out);
  item.load(in);
};

class Snapshot {
 public:
  // InvalidArgument: no folder, every < 0, keep < 1. Unavailable: the folder cannot be made.
  explicit Snapshot(SnapshotOptions options);
  Snapshot(Snapshot&&) noexcept;
  Snapshot& operator=(Snapshot&&) noexcept;
  ~Snapshot();

  // Parameters and buffers. restore() copies into them, so whoever shares them (an optimizer, DDP) sees the values.
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
  Snapshot& add(std::string name, at::Tensor& tensor, SnapshotItemOptions options = {});  // copied into
  Snapshot& add(std::string name, int64_t& number, SnapshotItemOptions options = {});
  Snapshot& add(std::string name, double& number, SnapshotItemOptions options = {});
  Snapshot& add(std::string name, std::map<std::string, int64_t>& numbers, SnapshotItemOptions options = {});
  Snapshot& add(std::string name, std::map<std::string, double>& numbers, SnapshotItemOptions options = {});
  // Tensors, numbers, strings, and lists and tuples of them, nested in archives as you like.
  template <Archivable T>
  requires(!std::derived_from<T, torch::nn::Module> &&
           !std::derived_from<T, torch::optim::Optimizer>) Snapshot& add(std::string name, T& item,
                                                                         SnapshotItemOptions options = {}) {
    return add_archivable(
        std::move(name), [&item](torch::serialize::OutputArchive& archive) { item.save(archive); },
        [&item](torch::serialize::InputArchive& archive) { item.load(archive); }, options);
  }

  // The step to go on with: the number that step() or save() was given; 0 where there is no snapshot.
  int64_t restore();

  // At the end of each step; `steps`: how many are done, 1 after the first. Saves where `.every` or a request says so.
  // True: this or another rank was asked to stop, and all have saved; leave the loop and end with status 0. Rank 0 has
  // said on standard error how to go on.
  [[nodiscard]] bool step(int64_t steps);

  // A boundary that is no end of a step: before the first one, between epochs, between the batches of an evaluation.
  // `steps`: how many are done, 0 or more. As step(), but saves only where this or another rank was asked to stop, and
  // with 0 steps there is nothing to save. Equally often on all ranks: mind evaluations with unequal parts. The next
  // run goes on after the last step, so what the program did since then is done again there: it must not be part of
  // what was added.
  [[nodiscard]] bool stop_here(int64_t steps);

  // Saves now.
  void save(int64_t steps);

  // As a SIGTERM to this rank: the next step() or stop_here() of all ranks saves and returns true.
  void request_stop() noexcept;
  // Whether this rank was asked. Not collective: to leave a long evaluation, for example; ranks may see it at different
  // times.
  bool stop_requested() const noexcept;

 private:
  Snapshot& add_archivable(std::string name, std::function<void(torch::serialize::OutputArchive&)> save,
                           std::function<void(torch::serialize::InputArchive&)> load, SnapshotItemOptions options);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
