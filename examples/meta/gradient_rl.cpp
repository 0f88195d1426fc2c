// Meta-gradient reinforcement learning: the agent learns how far ahead to look.
//
//   meta_gradient_rl --curve discount.svg
//
// A corridor of six rooms. In each, the agent may take the 0.3 that lies there, which ends the episode, or walk on; at
// the end of the corridor lies 1. An agent that discounts a reward by 0.6 per step finds that the first 0.3 is worth
// more. Here the discount is learned too: each inner step improves the policy by policy gradients of discounted
// returns, and the outer step asks how the discount should have been for the improved policy to collect more without
// any.
//
// Z. Xu, H. van Hasselt, D. Silver, "Meta-Gradient Reinforcement Learning", NeurIPS 2018.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <muster/optim/meta.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adam.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "../curve.h"

namespace optim = muster::optim;
using at::Tensor;

namespace {

constexpr int64_t kRooms = 6;

struct Policy : torch::nn::Module, optim::TensorMembers {
  Tensor walks;  // for each room: the logit of walking on
  Policy() { walks = register_parameter("walks", at::zeros({kRooms})); }
  std::vector<Tensor*> tensor_members() override { return {&walks}; }
};

// What a batch of agents did. [agents, rooms], except `collected`.
struct Episodes {
  Tensor there;      // whether the agent came to this room
  Tensor walked;     // whether it walked on
  Tensor rewards;    // what it got there
  Tensor collected;  // [agents] all of it
};
Episodes play(const Policy& policy, int64_t agents) {
  const at::NoGradGuard only_numbers;
  const Tensor walked = at::rand({agents, kRooms}).lt(policy.walks.sigmoid()).to(at::kFloat);
  const Tensor there = at::cat({at::ones({agents, 1}), walked.cumprod(1).narrow(1, 0, kRooms - 1)}, 1);
  Tensor rewards = 0.3 * (1 - walked);
  rewards.select(1, kRooms - 1).add_(walked.select(1, kRooms - 1));
  rewards.mul_(there);
  return {there, walked, rewards, rewards.sum(1)};
}

// The policy gradient's loss. Returns are discounted; a mean over the agents is their baseline.
Tensor loss(const Policy& policy, const Episodes& episodes, const Tensor& discount) {
  Tensor next = at::zeros({episodes.rewards.size(0)});
  std::vector<Tensor> returns(kRooms);
  for (int64_t room = kRooms - 1; room >= 0; --room)
    returns[static_cast<size_t>(room)] = next = episodes.rewards.select(1, room) + discount * next;
  const Tensor value = at::stack(returns, 1), there = episodes.there;
  const Tensor baseline = (value * there).sum(0) / there.sum(0).clamp_min(1);
  const Tensor log_probability =
      at::where(episodes.walked.to(at::kBool), at::log_sigmoid(policy.walks), at::log_sigmoid(-policy.walks));
  return -(log_probability * (value - baseline) * there).sum(1).mean();
}

struct Settings {
  int steps = 400;
  int64_t agents = 256;
  double discount = 0.6, lr = 1;
  bool learn = true;
  std::string curve;
};

void train(const Settings& settings) {
  at::manual_seed(1);
  Policy policy;
  Tensor logit = at::full({}, settings.discount).logit().set_requires_grad(true);
  torch::optim::Adam adam({logit}, 0.1);
  optim::MetaSGD inner(policy, {.lr = settings.lr});
  std::vector<double> collected;
  for (int step = 0; step < settings.steps; ++step) {
    const Episodes before = play(policy, settings.agents);
    inner.step(loss(policy, before, logit.sigmoid()));
    const Tensor outer = loss(policy, play(policy, settings.agents), at::ones({}));  // of the improved policy
    if (settings.learn) {
      adam.zero_grad();
      outer.backward();
      adam.step();
    }
    optim::stop_gradient(policy);  // the next step begins here
    inner.stop_gradient();
    collected.push_back(before.collected.mean().item<double>());
  }
  std::printf("collected: %.4f at first, %.4f at last\n", collected.front(), collected.back());
  std::printf("discount: %.4f at first, %.4f at last\n", settings.discount, logit.sigmoid().item<double>());
  draw_curve(settings.curve, "An agent that learns its discount",
             "0.3 in the first room, or 1 at the end of the corridor", "collected", collected, "step");
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Meta-gradient reinforcement learning in a corridor");
  app.add_option("--steps", settings.steps, "steps of the policy, and of the discount")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--agents", settings.agents, "episodes per step")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_option("--discount", settings.discount, "at first")->check(CLI::Range(0.01, 0.99))->capture_default_str();
  app.add_option("--lr", settings.lr, "rate of the policy")->capture_default_str();
  app.add_flag("!--fixed", settings.learn, "do not learn the discount");
  app.add_option("--curve", settings.curve, "draw what the agent collects in this file")->type_name("FILE.svg");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  train(settings);
}
