// Shared by the two CartPole programs: the policy, its training, and the output.
//
// Thread-safety: threads may call the methods of Learner concurrently, each for its own observer; but learn() only
// while no observer plays.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adam.h>

#include <chrono>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cartpole.h"

struct Settings {
  int observers = 0;  // 0: one on each worker but the agent's
  int episodes = 100;
  int hidden = 128;
  double lr = 0.01, gamma = 0.99;
  uint64_t seed = 1;
  std::string curve;  // the picture, an SVG; empty: none
};
// Reads the command line. Ends the program if the command line is invalid.
Settings parse_settings(int argc, char** argv, Settings settings);

// REINFORCE: R. J. Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
// learning", Machine Learning 8, 1992.
class Learner {
 public:
  explicit Learner(const Settings& settings);

  // Returns each observer's action in its state: 1 (push to the right) or 0. One forward pass for all observers. An
  // observer's actions depend only on its states and on the seed, not on the order in which observers play.
  std::vector<int> act(std::span<const int> observers, std::span<const CartPole::State> states);
  int act(int observer, const CartPole::State& state) { return act({&observer, 1}, {&state, 1})[0]; }
  void reward(int observer, float reward) { episode(observer).rewards.push_back(reward); }

  // Makes one step of the optimizer for the episodes that have just ended. Returns the mean of their rewards.
  double learn();

 private:
  struct Episode {
    std::vector<float> states;
    std::vector<int64_t> actions;
    std::vector<float> rewards;
    std::mt19937_64 random;
  };
  Episode& episode(int observer) { return episodes_[static_cast<size_t>(observer)]; }

  const Settings settings_;
  torch::nn::Sequential policy_;  // maps a state to the logits of the two actions
  torch::optim::Adam adam_;
  std::vector<Episode> episodes_;
};

// The rewards of a training, which starts when this is constructed. Prints a line now and then and a summary, and draws
// the curve.
class Rewards {
 public:
  void add(double mean_reward);
  void print_summary(const std::string& name) const;
  static void draw(const std::string& path, const std::vector<std::pair<std::string, Rewards>>& all);

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::vector<double> rewards_, running_, seconds_;
};
