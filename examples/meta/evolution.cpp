// Evolution strategies: a policy that is never differentiated learns to balance a pole.
//
//   meta_evolution --curve evolution.svg             # one process
//   muster run -n 4 meta_evolution                   # the episodes are spread over the workers
//
// The reward jumps, and the game is a black box, so there is no gradient. zero_order() estimates one from the rewards
// of policies nearby, and any optimizer can use it.
//
// T. Salimans, J. Ho, X. Chen, S. Sidor, I. Sutskever, "Evolution Strategies as a Scalable Alternative to Reinforcement
// Learning", 2017.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <muster/optim/zero_order.h>
#include <muster/remote/auto_init_rpc.h>
#include <muster/remote/on_rank.h>
#include <muster/remote/remote_call.h>
#include <torch/optim/adam.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "../curve.h"
#include "../rpc/cartpole.h"

namespace optim = muster::optim;
using at::Tensor;

namespace {

// The number of steps that the pole stands, in all these episodes together. policy: [4] weights of the state; right, if
// their sum is above 0.
Tensor play(muster::Whole<Tensor> policy, Tensor seeds) {
  const Tensor weights = policy->contiguous();
  const auto* const weight = weights.const_data_ptr<float>();
  double steps = 0;
  for (int64_t i = 0; i < seeds.numel(); ++i) {
    CartPole game(static_cast<uint64_t>(seeds[i].item<int64_t>()));
    for (CartPole::Step now{.state = game.reset()}; !now.over; ++steps) {
      float lean = 0;
      for (size_t k = 0; k < now.state.size(); ++k) lean += weight[k] * now.state[k];
      now = game.step(lean > 0);
    }
  }
  return at::scalar_tensor(steps);
}

struct Settings {
  int steps = 40, samples = 8, episodes = 8;
  double sigma = 0.3, lr = 0.2;
  std::string curve;
};

void train(const Settings& settings) {
  Tensor policy = at::zeros({4}).set_requires_grad(true);
  torch::optim::Adam adam({policy}, settings.lr);
  auto random = at::make_generator<at::CPUGeneratorImpl>(uint64_t{1});
  Tensor seeds;  // of this step's episodes: all policies play the same ones
  const auto reward = optim::zero_order(
      [&](const Tensor& policy) {
        // A sum, because workers may play unequal numbers of episodes.
        return muster::remote_sync_call<&play>(policy, seeds, {.reducer = muster::sum_reducer}) / settings.episodes;
      },
      {.method = optim::ZeroOrder::kAntithetic,
       .num_samples = settings.samples,
       .sigma = settings.sigma,
       .generator = random});
  std::vector<double> rewards;
  for (int step = 0; step < settings.steps; ++step) {
    seeds = at::arange(settings.episodes) + step * settings.episodes;
    const Tensor mean = reward(policy);
    adam.zero_grad();
    (-mean).backward();
    adam.step();
    rewards.push_back(mean.item<double>());
  }
  std::printf("steps that the pole stands: %.1f at first, %.1f at last\n", rewards.front(), rewards.back());
  draw_curve(settings.curve, "CartPole by evolution strategies",
             "steps that the pole stands, mean of " + std::to_string(settings.episodes) + " episodes", "steps",
             rewards);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Evolution strategies on CartPole");
  app.add_option("--steps", settings.steps, "steps of the policy")->check(CLI::Range(1, 100000))->capture_default_str();
  app.add_option("--samples", settings.samples, "pairs of policies per step")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("--episodes", settings.episodes, "episodes of each policy")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("--sigma", settings.sigma, "how far the policies are apart")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--curve", settings.curve, "draw the rewards in this file")->type_name("FILE.svg");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  muster::auto_init_rpc([&] { muster::rank_zero_only(train)(settings); });
}
