// iMAML: MAML whose inner loop runs until it has a solution, and is not recorded.
//
//   meta_imaml --curve imaml.svg
//
// The inner problem: fit a task's points, and stay near the parameters that all tasks begin with. How its solution
// changes with these is given by the implicit function theorem: one linear equation, solved by conjugate gradients. The
// memory that this takes does not grow with the number of inner steps.
//
// A. Rajeswaran, C. Finn, S. Kakade, S. Levine, "Meta-Learning with Implicit Gradients", NeurIPS 2019.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <muster/optim/functional_optimizer.h>
#include <muster/optim/implicit.h>
#include <torch/csrc/autograd/autograd.h>
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
  torch::nn::Linear in{1, 40}, out{40, 1};
  Net() {
    register_module("in", in);
    register_module("out", out);
  }
  Tensor loss(const Tensor& x, const Tensor& y) { return torch::nn::functional::mse_loss(out(in(x).tanh()), y); }
};

// A net that has adapted to a task. Its parameters are the solution, those of `start` the meta-parameters.
struct Adapted : optim::ImplicitMetaGradientModule<Adapted> {
  std::shared_ptr<Net> net = std::make_shared<Net>();
  Net& start;
  double nearness;
  int steps;

  Adapted(Net& start, double nearness, int steps)
      : ImplicitMetaGradientModule(optim::solve_cg({.maxiter = 5})), start(start), nearness(nearness), steps(steps) {
    register_module("net", net);
    register_meta_module("start", start);
  }
  Tensor objective(const Tensor& x, const Tensor& y) {
    Tensor apart = at::zeros({});
    const auto here = net->parameters(), there = start.parameters();
    for (size_t i = 0; i < here.size(); ++i) apart = apart + (here[i] - there[i]).square().sum();
    return net->loss(x, y) + 0.5 * nearness * apart;
  }
  void solve(const Tensor& x, const Tensor& y) {
    const auto parameters = net->parameters(), begin = start.parameters();
    {
      const at::NoGradGuard values_only;
      for (size_t i = 0; i < begin.size(); ++i) parameters[i].copy_(begin[i]);
    }
    optim::SGD sgd({.lr = 0.02});
    for (int step = 0; step < steps; ++step) sgd.step(parameters, torch::autograd::grad({objective(x, y)}, parameters));
  }
};

struct Settings {
  int steps = 100, tasks = 8, inner_steps = 10;
  double nearness = 1;
  std::string curve;
};

struct Task {
  Tensor x, y;  // [2, 10, 1]: points to learn from, and new ones
};
Task sinusoid(at::Generator& random) {
  const Tensor x = at::rand({2, 10, 1}, random) * 10 - 5;
  const Tensor phase = M_PI * at::rand({1}, random), amplitude = 0.5 + 2 * at::rand({1}, random);
  return {x, (x + phase).sin() * amplitude};
}

// Adds the meta-gradient to that of `start`. Returns the loss after adapting.
double learn_from(const Task& task, Net& start, const Settings& settings) {
  Adapted adapted(start, settings.nearness, settings.inner_steps);
  adapted.solve_implicitly(Tensor(task.x[0]), Tensor(task.y[0]));
  const Tensor loss = adapted.net->loss(task.x[1], task.y[1]);
  loss.backward();
  return loss.item<double>();
}

void train(const Settings& settings) {
  at::manual_seed(1);
  auto random = at::make_generator<at::CPUGeneratorImpl>(uint64_t{1}), others = random.clone();
  Net start;
  torch::optim::Adam adam(start.parameters(), 0.03);
  const auto mean_loss = [&](int tasks, at::Generator& from) {
    double sum = 0;
    adam.zero_grad();
    for (int task = 0; task < tasks; ++task) sum += learn_from(sinusoid(from), start, settings) / tasks;
    return sum;
  };
  others.set_current_seed(2);
  const double at_first = mean_loss(24, others);
  std::vector<double> losses;
  for (int step = 0; step < settings.steps; ++step) {
    losses.push_back(mean_loss(settings.tasks, random));
    adam.step();
  }
  others.set_current_seed(2);
  std::printf("loss after adapting: %.6f at first, %.6f at last\n", at_first, mean_loss(24, others));
  draw_curve(settings.curve, "iMAML on sinusoids", "loss on new points, near the common start; each step has new tasks",
             "loss", losses);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("iMAML: meta-learning with implicit gradients");
  app.add_option("--steps", settings.steps, "steps of the outer loop")
      ->check(CLI::Range(10, 100000))
      ->capture_default_str();
  app.add_option("--tasks", settings.tasks, "sinusoids per step")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--inner-steps", settings.inner_steps, "steps of the solver")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("--nearness", settings.nearness, "how strongly solutions are drawn to the common start")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--curve", settings.curve, "draw the loss in this file")->type_name("FILE.svg");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  train(settings);
}
