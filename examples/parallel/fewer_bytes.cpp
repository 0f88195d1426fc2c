// Four ways to send fewer bytes than DistributedDataParallel does, and what they cost, in one picture:
//
//   muster run -n 4 parallel_fewer_bytes --curve curves.svg
//
// The same net learns the same task five times: with averaged gradients (DDP), with gradients in bfloat16, with
// PowerSGD of rank 2, with the largest 2 % of the gradients, and by local SGD, which averages the parameters every 8
// steps. The picture has the loss over steps, and over the bytes that a rank has sent: on a slow network those are the
// time.
#include <ATen/Parallel.h>
#include <muster/muster.h>
#include <muster/train/plot.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace nn = torch::nn;
using torch::Tensor;

struct Net : nn::Module {
  Net() : layers(nn::Linear(32, 256), nn::Tanh(), nn::Linear(256, 256), nn::Tanh(), nn::Linear(256, 1)) {
    register_module("layers", layers);
  }
  Tensor forward(const Tensor& x) { return layers->forward(x); }
  nn::Sequential layers;
};

struct Settings {
  int steps = 300, local_steps = 8;
  int64_t batch = 256;
  std::string curve;
};

struct Way {
  std::string name;
  std::function<muster::CommHook()> hook;  // none: gradients are averaged as they are
  double share = 1;                        // of the bytes that DDP sends in a step,
  int first = 0;                           // after so many steps in which it sends as much
  bool is_local = false;
};

// What a rank sends for each byte of gradients with factors of this rank, as PowerSGD counts it.
double share_of_power_sgd(const Net& net, int64_t rank) {
  double sent = 0, all = 0;
  for (const Tensor& parameter : net.parameters()) {
    const auto elements = static_cast<double>(parameter.numel());
    const double factors =
        parameter.dim() < 2 ? elements : static_cast<double>(rank * (parameter.size(0) + parameter.size(1)));
    sent += std::min(elements, factors);
    all += elements;
  }
  return sent / all;
}

// The loss after each step, on points that no rank learns from.
std::vector<double> learn(const Way& way, const Settings& settings, const muster::World& world) {
  torch::manual_seed(0);
  Net teacher;
  const auto answer = [&](const Tensor& x) { return 10 * teacher.forward(x).detach(); };
  const Tensor test = torch::randn({1024, 32}), wanted = answer(test);
  auto net = std::make_shared<Net>();
  muster::DistributedDataParallel ddp(net);
  if (way.hook) ddp.register_comm_hook(way.hook());
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  muster::ModelAverager averager({.periods = {{settings.local_steps, {}}}});
  torch::manual_seed(1 + world.rank());
  const int64_t rows = settings.batch / world.world_size();
  std::vector<double> losses;
  for (int step = 0; step < settings.steps; ++step) {
    const Tensor x = torch::randn({rows, 32});
    sgd.zero_grad();
    torch::mse_loss(ddp(x), answer(x)).backward();
    sgd.step();
    if (way.is_local) averager.average_parameters(net->parameters());
    const torch::NoGradGuard no_grad;
    losses.push_back(torch::mse_loss(net->forward(test), wanted).item<double>());
  }
  return losses;
}

void compare(const Settings& settings, const muster::World& world) {
  const double mib = [] {
    double bytes = 0;
    for (const Tensor& parameter : Net().parameters()) bytes += static_cast<double>(parameter.nbytes());
    return bytes / (1 << 20);
  }();
  constexpr int kFirst = 10;
  const std::vector<Way> ways = {
      {.name = "DDP", .hook = nullptr},
      {.name = "bfloat16", .hook = [] { return muster::comm_hooks::bf16_compress; }, .share = 0.5},
      {.name = "PowerSGD",
       .hook = [] { return muster::comm_hooks::PowerSgd({.matrix_approximation_rank = 2, .start_iter = kFirst}); },
       .share = share_of_power_sgd(Net(), 2),
       .first = kFirst},
      {.name = "TopK",
       .hook = [] { return muster::comm_hooks::TopK({.ratio = 0.02}); },
       .share = 0.04},  // each with its place
      {.name = "local SGD",
       .hook = [] { return muster::comm_hooks::noop; },
       .share = 1.0 / settings.local_steps,
       .is_local = true}};
  muster::Panel over_steps{.title = "loss over steps", .x_label = "step", .series = {}, .y_min = 0},
      over_bytes{.title = "loss over bytes", .x_label = "MiB that a rank has sent", .series = {}, .y_min = 0};
  for (const Way& way : ways) {
    const auto losses = learn(way, settings, world);
    std::vector<double> steps, sent;
    for (size_t i = 0; i < losses.size(); ++i) {
      steps.push_back(static_cast<double>(i + 1));
      const double all = static_cast<double>(i + 1), first = std::min<double>(all, way.first);
      sent.push_back((first + (all - first) * way.share) * mib);
    }
    if (world.rank() == 0) std::printf("%s: loss %.5f, %.1f MiB sent\n", way.name.c_str(), losses.back(), sent.back());
    over_steps.series.push_back({.name = way.name, .x = steps, .y = losses});
    over_bytes.series.push_back({.name = way.name, .x = sent, .y = losses});
  }
  if (settings.curve.empty() || world.rank() != 0) return;
  muster::write_svg(settings.curve, {.title = "Fewer bytes than DistributedDataParallel sends",
                                     .subtitle = std::to_string(world.world_size()) + " ranks, the same net and task",
                                     .panels = {over_steps, over_bytes}});
  std::printf("the curves are in %s\n", settings.curve.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Ways to send fewer bytes than DistributedDataParallel does");
  app.add_option("--steps", settings.steps, "of each way")->check(CLI::Range(1, 100000))->capture_default_str();
  app.add_option("--local-steps", settings.local_steps, "of local SGD, between two averages")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--batch", settings.batch, "of all ranks together")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--curve", settings.curve, "draw the losses in this file")->type_name("FILE.svg");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  auto world = muster::init();
  compare(settings, world);
}
