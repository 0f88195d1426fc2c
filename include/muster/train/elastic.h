// Trainings that survive the loss of a rank: the other ranks keep their processes and memory; the lost rank is started
// again and gets the state from a living rank; then all ranks repeat the step.
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
// Epochs. run() makes a World, sends the state of the rank that has completed most steps to those that are behind, and
// calls `setup`. Then it calls the step function that `setup` returned, once per step. If a step throws PeerLost,
// TimeoutError, Aborted or Unavailable, the World ends; the remaining ranks wait until the launcher announces the next
// epoch, and begin it. If the launcher announces none (the job does not run under `muster run`, or no restarts are
// left), run() throws the error.
//
// Over several hosts the launchers meet before each epoch (docs/starting.md). A lost rank is started again. The ranks
// of a lost host are left out, or the ranks of another host take their places. A new host (--nnodes 2:4) brings more
// ranks. The other ranks keep their processes and, if possible, their numbers. A rank reads its number from the World
// (world.rank(), world.world_size()): RANK and WORLD_SIZE are those of its first epoch.
//
// Make everything that belongs to the World (groups, DDP, tensors on its heap) in `setup`, because it ends with the
// epoch; also everything that depends on the number of ranks. Changes that a step made before it threw are undone from
// a copy that is made after each step (Options::copy).
//
// What only the lost rank knew is lost: if its state differed from the others' (running statistics of a BatchNorm,
// which DDP takes from rank 0), it goes on with the state of the rank that has completed most steps. Everything else
// goes on bit for bit as without the loss.
//
// The program itself restores what is not part of the state: a rank that was started again begins with main(). So
// derive random numbers from state.step() and the rank (for example with torch::manual_seed at each step), and the
// position in the data too.
//
// If no living rank has the state (all ranks were lost, or the whole job was started again), it comes from the last
// snapshot in Options::snapshot, and the steps since then are repeated. Rank 0 alone writes the state, so any number of
// ranks can go on with it. Rank 0 must find the folder on whatever host it runs. A SIGTERM to any rank, or to the
// launcher, makes all ranks save at the next boundary, and run() returns false; the next start goes on there.
// Boundaries are the end of each step and the beginning of each epoch, after `setup`. If the launcher ends the job
// while ranks wait for a lost one, the ranks that have the state save it outside of an epoch. A StopSignal that is made
// first in main() also catches a SIGTERM that comes before run().
//
// Thread-safety: none; one thread per rank.
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
  virtual void load(const std::string& bytes) = 0;  // what save() returned, possibly on another rank

  int64_t step() const { return step_; }  // number of complete steps

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
  WorldOptions world;                         // for the World of every epoch
  std::chrono::milliseconds patience{60000};  // how long to wait for the launcher to announce an epoch
  // Keep a copy of the state as of the end of each step, in case the next step throws half-way. If false, a step must
  // change no part of the state before its last collective.
  bool copy = true;
  // If no living rank has the state, it comes from here. .every says how often it is saved. .group, .sharded,
  // .shard_folders, .local and .default_generator are ignored: rank 0 saves the state and nothing else.
  std::optional<SnapshotOptions> snapshot;
};

using Step = std::function<bool()>;
using Setup = std::function<Step(World&)>;

// A process may call it once. Returns on all ranks: true when the step function has returned false on all ranks, false
// if the ranks were asked to stop and have saved (Options::snapshot). Errors: those of the step that are not the loss
// of a rank; the loss itself, if the launcher does not replace the rank; those of Snapshot.
bool run(State& state, const Setup& setup, const Options& options = {});

}  // namespace muster::elastic
