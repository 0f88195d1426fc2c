// What the two CartPole programs share: the policy, how it learns, and what is printed of that.
//
// Thread-safety: Learner, all methods, each with its own observer; learn() while no observer plays.
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
// What the command line says; ends the program where it cannot be read.
Settings parse_settings(int argc, char** argv, Settings settings);

// REINFORCE: R. J. Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
// learning", Machine Learning 8, 1992.
class Learner {
 public:
  explicit Learner(const Settings& settings);

  // What each observer does in its state: 1, push to the right, or 0. One forward pass for all of them. An observer's
  // choices depend on its states and the seed alone, not on when others play.
  std::vector<int> act(std::span<const int> observers, std::span<const CartPole::State> states);
  int act(int observer, const CartPole::State& state) { return act({&observer, 1}, {&state, 1})[0]; }
  void reward(int observer, float reward) { episode(observer).rewards.push_back(reward); }

  // One step of the optimizer for the episodes that have just ended; returns the mean of their rewards.
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
  torch::nn::Sequential policy_;  // of a state: the logits of the two actions
  torch::optim::Adam adam_;
  std::vector<Episode> episodes_;
};

// The rewards of a training, which begins with this: a line now and then, what became of it, and the curve.
class Rewards {
 public:
  void add(double mean_reward);
  void print_summary(const std::string& name) const;
  static void draw(const std::string& path, const std::vector<std::pair<std::string, Rewards>>& all);

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::vector<double> rewards_, running_, seconds_;
};
