// MAML for reinforcement learning: a policy that finds any goal after one step of policy gradients.
//
//   muster run -n 4 --keep-going meta_maml_rl --curve maml_rl.svg
//
// A point in the plane walks towards a goal that it cannot see; its reward is the nearness. Each task has another goal.
// A worker plays some episodes, adapts a policy of its own to the task by MetaSGD, and plays again; the loss of the
// second episodes is the task's result, and its gradient goes through the adaptation back to worker 0.
//
// Tasks go to whichever worker has time. If a worker dies, its tasks are done again on another, with the same result: a
// task's random numbers come with it. (--keep-going: the launcher does not end the others. tolerates_losses: the end of
// RPC does not throw.)
//
// C. Finn, P. Abbeel, S. Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <muster/optim/meta.h>
#include <muster/remote/auto_init_rpc.h>
#include <muster/remote/on_rank.h>
#include <muster/remote/remote_call.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "../curve.h"

namespace optim = muster::optim;
using at::Tensor;

namespace {

constexpr int64_t kEpisodes = 20, kSteps = 10;
constexpr double kSpread = 0.1;  // standard deviation of a step

struct Policy : torch::nn::Module {
  torch::nn::Linear in{2, 32}, out{32, 2};
  Policy() {
    register_module("in", in);
    register_module("out", out);
  }
  Tensor mean(const Tensor& place) { return 0.3 * out(in(place).tanh()).tanh(); }  // of the step from there
};

struct Episodes {
  Tensor places, steps;  // [kSteps, kEpisodes, 2]
  Tensor rewards;        // [kSteps, kEpisodes]
};
Episodes play(Policy& policy, const Tensor& goal, at::Generator& random) {
  const at::NoGradGuard only_numbers;
  std::vector<Tensor> places, steps, rewards;
  Tensor place = at::zeros({kEpisodes, 2});
  for (int64_t i = 0; i < kSteps; ++i) {
    places.push_back(place);
    steps.push_back(policy.mean(place) + kSpread * at::randn({kEpisodes, 2}, random));
    place = place + steps.back();
    rewards.push_back(-(place - goal).norm(2, 1));
  }
  return {at::stack(places), at::stack(steps), at::stack(rewards)};
}
// The policy gradient's loss; the baseline is the mean at the same time of all episodes.
Tensor loss(Policy& policy, const Episodes& episodes) {
  const Tensor to_come = episodes.rewards.flip(0).cumsum(0).flip(0);
  const Tensor advantage = to_come - to_come.mean(1, true);
  const Tensor log_probability = -((episodes.steps - policy.mean(episodes.places)) / kSpread).square().sum(2) / 2;
  return -(log_probability * (advantage / (advantage.std() + 1e-6))).mean();
}

// task: the goal and a seed. Returns the loss after adapting, and what the adapted policy collects per step.
std::pair<Tensor, double> after_adapting(optim::ModuleState model, Tensor task, double lr) {
  auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(task[2].item<double>()));
  const Tensor goal = task.narrow(0, 0, 2);
  Policy policy;
  optim::recover_state_dict(policy, model);
  optim::MetaSGD inner(policy, {.lr = lr});
  inner.step(loss(policy, play(policy, goal, random)));
  const Episodes adapted = play(policy, goal, random);
  return {loss(policy, adapted), adapted.rewards.mean().item<double>()};
}

struct Settings {
  int steps = 150, tasks = 8;
  double lr = 0.1;
  std::string curve;
};

void train(const Settings& settings) {
  at::manual_seed(1);
  Policy policy;
  torch::optim::Adam adam(policy.parameters(), 0.003);
  std::vector<double> rewards;
  for (int step = 0; step < settings.steps; ++step) {
    const Tensor goals = at::rand({settings.tasks, 2}) * 2 - 1, seeds = at::randint(1 << 20, {settings.tasks, 1});
    const auto results = muster::remote_sync_call<&after_adapting>(
        optim::extract_state_dict(policy), at::cat({goals, seeds.to(at::kFloat)}, 1), settings.lr,
        {.partitioner = muster::dim_partitioner(0, {.exclusive = true, .keepdim = false, .balanced = true}),
         .max_retries = 2});
    Tensor loss = at::zeros({});
    double reward = 0;
    for (const auto& [its, collected] : results) {
      loss = loss + its / settings.tasks;
      reward += collected / settings.tasks;
    }
    adam.zero_grad();
    loss.backward();
    adam.step();
    rewards.push_back(reward);
  }
  const auto mean = [&](auto from) { return std::accumulate(from, from + 10, 0.0) / 10; };
  std::printf("reward after adapting: %.4f at first, %.4f at last\n", mean(rewards.begin()), mean(rewards.end() - 10));
  draw_curve(settings.curve, "MAML for reinforcement learning",
             "distance to the goal after one step of policy gradients, mean of all times, negative", "reward", rewards);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("MAML for reinforcement learning: walks to goals that it cannot see");
  app.add_option("--steps", settings.steps, "steps of the outer loop")
      ->check(CLI::Range(10, 100000))
      ->capture_default_str();
  app.add_option("--tasks", settings.tasks, "goals per step")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--inner-lr", settings.lr, "rate of the adaptation")->capture_default_str();
  app.add_option("--curve", settings.curve, "draw the rewards in this file")->type_name("FILE.svg");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  muster::auto_init_rpc([&] { muster::rank_zero_only(train)(settings); }, {.tolerates_losses = true});
}
