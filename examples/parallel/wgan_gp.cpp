// A generative adversarial network with gradient penalty (WGAN-GP) that learns eight clusters of points on a circle:
//
//   muster run -n 2 parallel_wgan_gp
//
// The penalty is a function of the critic's gradient, so its backward() needs derivatives of derivatives, through
// DistributedDataParallel. Source: Gulrajani et al., "Improved Training of Wasserstein GANs", NIPS 2017.
#include <ATen/Parallel.h>
#include <muster/muster.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim/adam.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "../curve.h"

namespace {

namespace nn = torch::nn;
using torch::Tensor;

struct Perceptron : nn::Module {
  Perceptron(int64_t inputs, int64_t outputs)
      : layers(nn::Linear(inputs, 128), nn::ReLU(), nn::Linear(128, 128), nn::ReLU(), nn::Linear(128, outputs)) {
    register_module("layers", layers);
  }
  Tensor forward(const Tensor& x) { return layers->forward(x); }
  nn::Sequential layers;
};
using Model = muster::DistributedDataParallel<Perceptron>;

constexpr int64_t kNoise = 4, kClusters = 8;

Tensor centers() {
  const Tensor angles = torch::arange(kClusters) * (2 * M_PI / kClusters);
  return torch::stack({angles.cos(), angles.sin()}, 1);
}
Tensor real_points(int64_t count) {
  return centers().index({torch::randint(kClusters, {count})}) + 0.05 * torch::randn({count, 2});
}

// The critic's slope along the way from real to generated points should be 1.
Tensor gradient_penalty(Model& critic, const Tensor& real, const Tensor& generated) {
  const Tensor place = torch::rand({real.size(0), 1});
  const Tensor between = (place * real + (1 - place) * generated).requires_grad_();
  const Tensor slope = torch::autograd::grad({critic(between).sum()}, {between}, {}, /*retain_graph=*/true,
                                             /*create_graph=*/true)[0];
  return (slope.norm(2, 1) - 1).square().mean();
}

struct Settings {
  int steps = 400, critic_steps = 5;
  int64_t batch = 256;
  std::string curve;
};

void learn(const Settings& settings, const muster::World& world) {
  torch::manual_seed(0);  // the same points to look at on any number of ranks
  const Tensor looked_at = torch::randn({512, kNoise});
  auto generator = std::make_shared<Perceptron>(kNoise, 2), critic = std::make_shared<Perceptron>(2, 1);
  Model generate(generator), judge(critic);
  const auto options = torch::optim::AdamOptions(1e-3).betas({0.5, 0.9});
  torch::optim::Adam generator_adam(generator->parameters(), options), critic_adam(critic->parameters(), options);
  torch::manual_seed(1 + world.rank());  // each rank has its own part of the batch
  const int64_t rows = settings.batch / world.world_size();

  const auto distance = [&] {  // of generated points to their nearest clusters
    const torch::NoGradGuard no_grad;
    return std::get<0>(torch::cdist(generator->forward(looked_at), centers()).min(1)).mean().item<double>();
  };
  const double at_first = distance();
  std::vector<double> distances;
  for (int step = 0; step < settings.steps; ++step) {
    for (int i = 0; i < settings.critic_steps; ++i) {
      const Tensor real = real_points(rows), generated = generate(torch::randn({rows, kNoise})).detach();
      critic_adam.zero_grad();
      const Tensor loss = judge(generated).mean() - judge(real).mean() + 0.1 * gradient_penalty(judge, real, generated);
      loss.backward();
      critic_adam.step();
    }
    for (const Tensor& parameter : critic->parameters()) parameter.set_requires_grad(false);
    generator_adam.zero_grad();
    (-judge(generate(torch::randn({rows, kNoise}))).mean()).backward();
    generator_adam.step();
    for (const Tensor& parameter : critic->parameters()) parameter.set_requires_grad(true);
    distances.push_back(distance());
  }
  if (world.rank() != 0) return;
  std::printf("distance to the nearest cluster: %.4f at first, %.4f at last\n", at_first, distance());
  draw_curve(settings.curve, "WGAN-GP", "distance of generated points to the nearest cluster", "distance", distances,
             "step");
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("A generative adversarial network with gradient penalty");
  app.add_option("--steps", settings.steps, "steps of the generator")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--critic-steps", settings.critic_steps, "steps of the critic for each of these")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  app.add_option("--batch", settings.batch, "points of all ranks together")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--curve", settings.curve, "draw the distance in this file")->type_name("FILE.svg");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  auto world = muster::init();
  learn(settings, world);
}
