// A learning rate that is learned: the loss after some steps is a function of the rates of these steps, and has a
// gradient.
//
//   meta_learned_rate --curve rate.svg --graph steps.svg
//
// Each inner step has a rate of its own, and all begin too small. The outer loop trains a new net from scratch each
// time, and improves the rates by the gradient of the loss after the last step. --graph draws the computation of two
// steps: it shows where the rates come in.
//
// A. G. Baydin et al., "Online Learning Rate Adaptation with Hypergradient Descent", ICLR 2018; D. Maclaurin,
// D. Duvenaud, R. Adams, "Gradient-based Hyperparameter Optimization through Reversible Learning", ICML 2015.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <muster/optim/make_dot.h>
#include <muster/optim/meta.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "../curve.h"

namespace optim = muster::optim;
using at::Tensor;

namespace {

struct Net : torch::nn::Module {
  torch::nn::Linear in{2, 16}, out{16, 1};
  Net() {
    register_module("in", in);
    register_module("out", out);
  }
  Tensor loss(const Tensor& x, const Tensor& y) { return torch::nn::functional::mse_loss(out(in(x).tanh()), y); }
};

// Trains a net with these rates (their logarithms), one per step, and returns its loss on new points. `names` gets the
// net's parameters before each step.
Tensor loss_after_training(const std::vector<Tensor>& rates, int64_t seed, optim::NamedTensors* names = nullptr) {
  at::manual_seed(static_cast<uint64_t>(seed));
  const Tensor x = at::randn({2, 64, 2}), y = (2 * x.select(2, 0)).sin().unsqueeze(2) + x.select(2, 1).unsqueeze(2);
  Net net;
  optim::MetaSGD inner(net, {.lr = [&](int64_t step) { return rates[static_cast<size_t>(step)].exp(); }});
  for (size_t step = 0; step < rates.size(); ++step) {
    if (names)
      for (const auto& one : net.named_parameters())
        names->emplace_back("step " + std::to_string(step) + ": " + one.key(), one.value());
    inner.step(net.loss(x[0], y[0]));
  }
  return net.loss(x[1], y[1]);
}

void draw_graph(const std::string& file, std::vector<Tensor> rates) {
  rates.resize(2);
  optim::NamedTensors names{{"log rate 0", rates[0]}, {"log rate 1", rates[1]}};
  const Tensor loss = loss_after_training(rates, 0, &names);
  std::printf("the graph of two steps is in %s\n", optim::write_dot(file, {loss}, names).c_str());
}

struct Settings {
  int steps = 80, inner_steps = 10;
  double start = 0.01;
  std::string curve, graph;
};

void learn(const Settings& settings) {
  std::vector<Tensor> rates;  // their logarithms: a rate stays above 0
  for (int step = 0; step < settings.inner_steps; ++step)
    rates.push_back(at::full({}, std::log(settings.start)).set_requires_grad(true));
  torch::optim::Adam adam(rates, 0.1);
  std::vector<double> losses;
  const auto test = [&] { return loss_after_training(rates, 0).item<double>(); };
  const double at_first = test();
  for (int step = 1; step <= settings.steps; ++step) {
    const Tensor loss = loss_after_training(rates, step);
    adam.zero_grad();
    loss.backward();
    adam.step();
    losses.push_back(loss.item<double>());
  }
  std::printf("loss of a trained net: %.6f at first, %.6f at last\n", at_first, test());
  std::printf("rates:");
  for (const Tensor& rate : rates) std::printf(" %.3f", std::exp(rate.item<double>()));
  std::printf("\n");
  draw_curve(settings.curve, "Learning rates that are learned", "loss of a net after training with them from scratch",
             "loss", losses);
  if (!settings.graph.empty()) draw_graph(settings.graph, rates);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Learns the learning rates of ten steps of SGD");
  app.add_option("--steps", settings.steps, "steps of the outer loop")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--inner-steps", settings.inner_steps, "steps of each training, and rates")
      ->check(CLI::Range(2, 1000))
      ->capture_default_str();
  app.add_option("--start", settings.start, "all rates at first")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--curve", settings.curve, "draw the loss in this file")->type_name("FILE.svg");
  app.add_option("--graph", settings.graph, "draw the computation of two steps in this file")
      ->type_name("FILE.dot|svg");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  learn(settings);
}
