// MAML with an ordinary net: it learns to fit any sinusoid after a few steps on ten of its points.
//
//   meta_maml                                         # one process
//   muster run -n 2 meta_maml --curve maml.svg        # the tasks are spread over the workers
//
// A worker adapts a net of its own to each of its tasks, with MetaSGD, and returns the loss on new points. That loss is
// a function of the parameters that the call brought: backward() goes through the inner steps and back to worker 0.
// The meta-gradient is the same on any number of workers. (examples/autograd/maml.cpp has the tasks' data on the
// workers, and each inner step is a remote call.)
//
// C. Finn, P. Abbeel, S. Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <muster/optim/meta.h>
#include <muster/remote/auto_init_rpc.h>
#include <muster/remote/on_rank.h>
#include <muster/remote/remote_call.h>
#include <torch/nn/functional/loss.h>
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

struct Net : torch::nn::Module {
  torch::nn::Linear in{1, 40}, middle{40, 40}, out{40, 1};
  Net() {
    register_module("in", in);
    register_module("middle", middle);
    register_module("out", out);
  }
  Tensor loss(const Tensor& x, const Tensor& y) {
    return torch::nn::functional::mse_loss(out(middle(in(x).tanh()).tanh()), y);
  }
};

// A task has the shape [2, 2, 10, 1]: x and y, of the points to learn from and of the new points.
Tensor loss_after_adapting(optim::ModuleState model, Tensor task, int inner_steps) {
  Net net;
  optim::recover_state_dict(net, model);
  optim::MetaSGD inner(net, {.lr = 0.02});
  for (int step = 0; step < inner_steps; ++step) inner.step(net.loss(task[0][0], task[1][0]));
  return net.loss(task[0][1], task[1][1]);
}

// With random numbers of their own: the nets of loss_after_adapting() draw from the worker's.
Tensor sinusoids(int64_t count, at::Generator& random) {
  const Tensor x = at::rand({count, 2, 10, 1}, random) * 10 - 5;
  const Tensor amplitude = 0.5 + 2 * at::rand({count, 1, 1, 1}, random),
               phase = M_PI * at::rand({count, 1, 1, 1}, random);
  return at::stack({x, (x + phase).sin() * amplitude}, 1);
}

struct Settings {
  int steps = 300, tasks = 8, inner_steps = 3;
  std::string curve;  // the picture, an SVG; empty: none
};

void train(const Settings& settings) {
  at::manual_seed(1);
  auto random = at::make_generator<at::CPUGeneratorImpl>(uint64_t{1});
  Net net;
  torch::optim::Adam adam(net.parameters(), 0.003);
  std::vector<double> losses;
  for (int step = 0; step < settings.steps; ++step) {
    const Tensor loss = muster::remote_sync_call<&loss_after_adapting>(
        optim::extract_state_dict(net), sinusoids(settings.tasks, random), settings.inner_steps,
        {.partitioner = muster::dim_partitioner(0, {.exclusive = true, .keepdim = false}),
         .reducer = muster::mean_reducer});
    adam.zero_grad();
    loss.backward();
    if (step == 0) {
      std::printf("meta-gradient:");
      for (const Tensor& one : net.parameters()) std::printf(" %.9f", one.grad().norm().item<double>());
      std::printf("\n");
    }
    adam.step();
    losses.push_back(loss.item<double>());
  }
  const auto mean = [&](auto from) { return std::accumulate(from, from + 10, 0.0) / 10; };
  std::printf("loss after adapting: %.6f at first, %.6f at last\n", mean(losses.begin()), mean(losses.end() - 10));
  draw_curve(settings.curve, "MAML on sinusoids",
             "loss on new points, after " + std::to_string(settings.inner_steps) +
                 " steps on ten others; each step has new tasks",
             "loss", losses);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("MAML: differentiable inner steps, on any number of workers");
  app.add_option("--steps", settings.steps, "steps of the outer loop")
      ->check(CLI::Range(10, 100000))
      ->capture_default_str();
  app.add_option("--tasks", settings.tasks, "sinusoids per step")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--inner-steps", settings.inner_steps, "steps on each task")
      ->check(CLI::Range(0, 100))
      ->capture_default_str();
  app.add_option("--curve", settings.curve, "draw the loss in this file")->type_name("FILE.svg");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  muster::auto_init_rpc([&] { muster::rank_zero_only(train)(settings); });
}
