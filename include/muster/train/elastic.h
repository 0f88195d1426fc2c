// Trainings that survive the loss of a rank: the others keep their processes and memory, the lost one is started again,
// gets the state from a rank that lives, and the step is tried again.
//
//   muster::elastic::TrainingState state(*net, sgd);
//   muster::elastic::run(state, [&](muster::World& world) {
//     auto ddp = std::make_shared<muster::DistributedDataParallel>(net);  // of this World
//     return [&, ddp] {                                                   // a step; false when it was the last
//       train(*ddp, sgd, batch_of(state.step(), world.rank()));
//       return state.step() + 1 < steps;
//     };
//   });
//
//   muster run -n 4 --max-restarts 10 ./train
//
// Epochs. run() makes a World, brings the state of the rank that is furthest to those that are behind, calls `setup`
// and then, step by step, what that returned. When a step throws PeerLost, Timeout, Aborted or Unavailable, the World
// is gone; the ranks that are left wait for the launcher's word about the next epoch, and begin it. Where no such word
// comes (not under `muster run`, or no restarts are left), the error is thrown on.
//
// Over several hosts the launchers meet before each epoch (docs/starting.md): a rank that was lost is started again,
// the ranks of a host that was lost are left out or those of another one take their places, and one that comes
// (--nnodes 2:4) brings more. The others keep their processes and, where it can be, their numbers: a World says which a
// rank has (world.rank(), world.world_size()), not RANK and WORLD_SIZE, which are those of its first epoch.
//
// Whatever belongs to the World (groups, DDP, tensors on its heap) belongs into `setup`, since it ends with the epoch,
// and so does what depends on the number of ranks. What a step changes before it throws is undone from a copy that is
// made after each step (Options::copy).
//
// What only the lost rank knew is lost: where its state differed from the others' (running statistics of a BatchNorm,
// which DDP takes from rank 0), it goes on with those of the rank that is furthest. All else goes on to the bit.
//
// What is not part of the state is the program's: a rank that was started again begins with main(), so random numbers
// that must go on as before follow from state.step() and the rank (torch::manual_seed at each step, say), and so does
// the place in the data.
//
// When nobody is left who has the state (all ranks were lost, or the job started again as a whole), it comes from the
// last snapshot in Options::snapshot, and the steps since then are done again. Rank 0 writes the state alone, so ranks
// of any number can go on with it; the folder must be where rank 0 finds it, whatever host that is on. A SIGTERM to any
// rank, or to the launcher, then makes all save at the next boundary and run() return false; the next start goes on
// there. Boundaries are the end of each step and the beginning of each epoch, after `setup`. Where the launcher ends
// the job while ranks wait for one that was lost, those that have the state save it without an epoch. A StopSignal that
// is made first in main() makes a SIGTERM from before run() count.
//
// Thread-safety: none; one thread a rank.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "muster/checkpoint/snapshot.h"
#include "muster/comm/world.h"

namespace torch {
namespace nn {
class Module;
}
namespace optim {
class Optimizer;
}
}  // namespace torch

namespace muster::elastic {

struct Options;

// What must be the same on all ranks between two steps.
class State {
 public:
  virtual ~State() = default;
  virtual std::string save() const = 0;
  virtual void load(const std::string& bytes) = 0;  // what save() gave, on another rank perhaps

  int64_t step() const { return step_; }  // how many are complete

 private:
  friend bool run(State&, const std::function<std::function<bool()>(World&)>&, const Options&);
  int64_t step_ = 0;
};

// Parameters and buffers of a module, and an optimizer's state. Both must outlive it.
class TrainingState : public State {
 public:
  TrainingState(torch::nn::Module& module, torch::optim::Optimizer& optimizer)
      : module_(module), optimizer_(optimizer) {}
  std::string save() const override;
  void load(const std::string& bytes) override;

 private:
  torch::nn::Module& module_;
  torch::optim::Optimizer& optimizer_;
};

struct Options {
  WorldOptions world;                         // of every epoch
  std::chrono::milliseconds patience{60000};  // with the launcher, for its word
  // Keep a copy of the state as of the end of each step, for the case that the next one throws half-way. Without it a
  // step must change nothing that is part of the state before its last collective.
  bool copy = true;
  // Where nobody alive has the state, it comes from here. .every says how often it is saved; .group, .sharded and
  // .default_generator count for nothing: rank 0 saves, and the state is all that is saved.
  std::optional<SnapshotOptions> snapshot;
};

using Step = std::function<bool()>;
using Setup = std::function<Step(World&)>;

// Once in a process. Returns on all ranks: true when the step function has returned false on all, false where they were
// asked to stop, and have saved (Options::snapshot). Errors: those of the step that are no loss of a rank; the loss
// itself, where nobody replaces it; those of Snapshot.
bool run(State& state, const Setup& setup, const Options& options = {});

}  // namespace muster::elastic
