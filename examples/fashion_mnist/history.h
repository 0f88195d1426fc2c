// What the training has come to, and how it is shown: the curves, the table at the end, the JSON file.
#pragma once

#include <muster/comm/world.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "flags.h"

struct Score {
  double loss = 0, accuracy = 0;
  int64_t images = 0;
};

// Sums over the images that this rank has seen; score() puts all ranks' together, and every rank must call it.
class Tally {
 public:
  void add(const torch::Tensor& output, const torch::Tensor& target, double loss);
  void add(const Tally& other);
  Score score() const;

  Score own_score() const;  // of what this one holds

  torch::Tensor numbers() const;
  void set(const torch::Tensor& numbers);

 private:
  double loss_ = 0;
  int64_t correct_ = 0, images_ = 0;
};

class History {
 public:
  // Each rank notes what it sees, and once an epoch all bring it together. With `together`, at each step: then every
  // rank has all of it, and none is missed when another one is lost.
  explicit History(bool together = false) : together_(together) {}

  // The World that the next epochs are of; only as long as they are.
  void join(const muster::World& world) {
    world_ = &world;
    ranks_ = world.world_size();
  }

  // Around the training loop of an epoch. What lies between counts as training time.
  void begin_epoch();
  void step(const torch::Tensor& output, const torch::Tensor& target, double loss);  // all ranks, where `together`
  void end_epoch();                                                                  // all ranks
  void test(const Score& score);                                                     // after it

  // For snapshots, within an epoch: all of it but how long things took, which begins anew.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  // Rank 0.
  void write_curves(const Flags& flags) const;
  void write_json(const Flags& flags) const;
  std::string table(const Flags& flags) const;

 private:
  using Clock = std::chrono::steady_clock;
  double seconds() const { return std::chrono::duration<double>(time_).count(); }
  double images_per_second() const { return static_cast<double>(images_) / seconds(); }

  const bool together_;
  const muster::World* world_ = nullptr;
  int ranks_ = 1;
  std::vector<double> step_losses_;   // the mean over the whole batch, as all ranks see it
  std::vector<double> epoch_losses_;  // of the epoch under way; this rank's, or all ranks' where `together`
  std::vector<Score> train_, test_;   // of each epoch
  Tally tally_;
  int64_t images_ = 0;  // that this run has trained on, to within a batch
  Clock::time_point began_;
  std::chrono::nanoseconds blocked_before_{}, time_{};
  double blocked_ = 0;  // seconds, mean over the ranks
};
