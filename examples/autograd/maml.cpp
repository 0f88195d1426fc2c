// Learning to learn: a net that fits any sinusoid after a few steps on ten of its points.
//
//   muster run -n 2 autograd_maml --curve maml.svg
//
// Every worker has some of the tasks. Each task is a sinusoid with its own data, which never leave the worker. Worker 0
// makes the inner steps: the loss of a task is a remote call, and so is its gradient. The outer gradient goes through
// these gradients: it is of second order, through remote calls, and is the same on any number of workers.
//
// C. Finn, P. Abbeel, S. Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <muster/comm/world.h>
#include <muster/rpc/rref.h>
#include <torch/csrc/autograd/autograd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "../curve.h"

namespace rpc = muster::rpc;
using at::Tensor;

namespace {

struct Settings {
  int steps = 60, tasks = 8, inner_steps = 2;
  double inner_lr = 0.02, lr = 0.003;
  int64_t hidden = 32;
  std::string curve;  // the picture, an SVG; empty: none
};

using Parameters = std::vector<Tensor>;

Tensor forward(const Parameters& p, const Tensor& x) { return (x.matmul(p[0]) + p[1]).tanh().matmul(p[2]).add(p[3]); }

// A sinusoid: points to learn from, and other points to test with.
class Sinusoid {
 public:
  explicit Sinusoid(int64_t seed) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
    const Tensor drawn = at::rand({2}, generator, at::kDouble);
    const double amplitude = 0.5 + 2 * drawn[0].item<double>(), phase = M_PI * drawn[1].item<double>();
    x_ = at::rand({2, 10, 1}, generator, at::kDouble) * 10 - 5;
    y_ = (x_ + phase).sin() * amplitude;
  }
  Tensor loss(const Parameters& parameters, bool test) {
    const int64_t which = test ? 1 : 0;
    return (forward(parameters, x_[which]) - y_[which]).square().mean();
  }

 private:
  Tensor x_, y_;
};

// The loss on the test points after some steps on the points to learn from.
Tensor loss_after_adapting(const rpc::RRef<Sinusoid>& task, Parameters parameters, const Settings& settings) {
  for (int step = 0; step < settings.inner_steps; ++step) {
    const Tensor loss = task.sync<&Sinusoid::loss>(parameters, false);
    const auto gradients = torch::autograd::grad({loss}, parameters, {}, true, true);
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i] = parameters[i] - settings.inner_lr * gradients[i];
  }
  return task.sync<&Sinusoid::loss>(parameters, true);
}

void train(const Settings& settings) {
  const auto workers = static_cast<int>(rpc::all_workers().size());
  std::vector<rpc::RRef<Sinusoid>> tasks;
  for (int i = 0; i < settings.tasks; ++i) tasks.push_back(rpc::remote<Sinusoid>(i % workers, int64_t{100 + i}));

  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{1});
  const int64_t hidden = settings.hidden;
  Parameters parameters{at::randn({1, hidden}, generator, at::kDouble), at::randn({hidden}, generator, at::kDouble),
                        at::randn({hidden, 1}, generator, at::kDouble) / std::sqrt(static_cast<double>(hidden)),
                        at::zeros({1}, at::kDouble)};
  Parameters first, second;  // Adam's moments
  for (Tensor& one : parameters) {
    one.set_requires_grad(true);
    first.push_back(at::zeros_like(one));
    second.push_back(at::zeros_like(one));
  }
  std::vector<double> losses;
  for (int step = 1; step <= settings.steps; ++step) {
    Tensor loss = at::zeros({}, at::kDouble);
    for (const auto& task : tasks) loss = loss + loss_after_adapting(task, parameters, settings) / settings.tasks;
    const auto gradients = torch::autograd::grad({loss}, parameters);
    if (step == 1) {
      std::printf("meta-gradient:");
      for (const Tensor& one : gradients)
        std::printf(" %.9f %.9f", one.sum().item<double>(), one.norm().item<double>());
      std::printf("\n");
    }
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) {
      first[i] = 0.9 * first[i] + 0.1 * gradients[i];
      second[i] = 0.999 * second[i] + 0.001 * gradients[i].square();
      const Tensor by = (second[i] / (1 - std::pow(0.999, step))).sqrt() + 1e-8;
      parameters[i].sub_(settings.lr * first[i] / (1 - std::pow(0.9, step)) / by);
    }
    losses.push_back(loss.item<double>());
  }
  std::printf("loss after adapting: %.6f at first, %.6f at last\n", losses.front(), losses.back());
  draw_curve(settings.curve, "MAML on sinusoids",
             "loss on new points, after " + std::to_string(settings.inner_steps) + " steps on ten others, of all tasks",
             "loss", losses);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("MAML: inner steps by gradients through remote calls");
  app.add_option("--steps", settings.steps, "steps of the outer loop")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--tasks", settings.tasks, "sinusoids")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--inner-steps", settings.inner_steps, "steps on each task")
      ->check(CLI::Range(0, 100))
      ->capture_default_str();
  app.add_option("--curve", settings.curve, "draw the loss in this file")->type_name("FILE.svg");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  auto world = muster::init();
  rpc::init();
  if (world.rank() == 0) train(settings);
  rpc::shutdown();
}
