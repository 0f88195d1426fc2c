// The results of the training, and their output: the curves, the table at the end, the JSON file.
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

// Sums over the images that this rank has seen. score() combines the sums of all ranks; every rank must call it.
class Tally {
 public:
  void add(const torch::Tensor& output, const torch::Tensor& target, double loss);
  void add(const Tally& other);
  Score score() const;

  Score own_score() const;  // of this rank's sums only

  torch::Tensor numbers() const;
  void set(const torch::Tensor& numbers);

 private:
  double loss_ = 0;
  int64_t correct_ = 0, images_ = 0;
};

class History {
 public:
  // Each rank records its own results, and the ranks combine them once per epoch. With `together` they combine them at
  // each step: then every rank has all results, and nothing is missing when a rank is lost.
  explicit History(bool together = false) : together_(together) {}

  // Sets the World of the next epochs. It must live as long as they run.
  void join(const muster::World& world) {
    world_ = &world;
    ranks_ = world.world_size();
  }

  // Call begin_epoch() before the training loop of an epoch and end_epoch() after it. The time between counts as
  // training time.
  void begin_epoch();
  void step(const torch::Tensor& output, const torch::Tensor& target, double loss);  // collective with `together`
  void end_epoch();                                                                  // collective
  void test(const Score& score);                                                     // after end_epoch()

  // For snapshots, also within an epoch. They hold everything but the times, which start from zero again.
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
  std::vector<double> step_losses_;   // the mean over the whole batch; the same on all ranks
  std::vector<double> epoch_losses_;  // of the epoch under way: this rank's, or with `together` all ranks'
  std::vector<Score> train_, test_;   // of each epoch
  Tally tally_;
  int64_t images_ = 0;  // images that this run has trained on, to within a batch
  Clock::time_point began_;
  std::chrono::nanoseconds blocked_before_{}, time_{};
  double blocked_ = 0;  // seconds, mean over the ranks
};
