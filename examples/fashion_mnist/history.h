// What the training has come to, and how it is shown: the curves, the table at the end, the JSON file.
#pragma once

#include <muster/comm/world.h>
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
  Score score() const;

 private:
  double loss_ = 0;
  int64_t correct_ = 0, images_ = 0;
};

class History {
 public:
  explicit History(const muster::World& world) : world_(world) {}

  // Around the training loop of an epoch. What lies between counts as training time.
  void begin_epoch();
  void step(const torch::Tensor& output, const torch::Tensor& target, double loss);
  void end_epoch();               // all ranks
  void test(const Score& score);  // after it

  // Rank 0.
  void write_curves(const Flags& flags) const;
  void write_json(const Flags& flags) const;
  std::string table(const Flags& flags) const;

 private:
  using Clock = std::chrono::steady_clock;
  double seconds() const { return std::chrono::duration<double>(time_).count(); }
  double images_per_second() const { return static_cast<double>(images_) / seconds(); }

  const muster::World& world_;
  std::vector<double> step_losses_;   // the mean over the whole batch, as all ranks see it
  std::vector<double> epoch_losses_;  // this rank's, of the epoch under way
  std::vector<Score> train_, test_;   // of each epoch
  Tally tally_;
  int64_t images_ = 0;
  Clock::time_point began_;
  std::chrono::nanoseconds blocked_before_{}, time_{};
  double blocked_ = 0;  // seconds, mean over the ranks
};
