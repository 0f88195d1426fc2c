// What DistributedDataParallel costs besides the synchronisation of a step. One JSON object.
//
//   muster run -n 2 bench_ddp_costs construction      milliseconds to construct it, of the slowest rank
//   muster run -n 2 bench_ddp_costs watch             a step with DdpOptions::check_divergence_every, and one without
//
// For `watch`, two transformers take steps by turns. One of them compares hashes in each step. The other steps only
// count, so a tenth of the difference is the cost of a step if every tenth compares; `share` is that.
#include <ATen/Parallel.h>
#include <torch/nn.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>

#include "muster/muster.h"
#include "muster/optim/optimizers.h"
#include "nets.h"
#include "turns.h"

namespace {

using bench::Net;

// `layers` Linear of 2048 x 2048, 16 MiB each.
struct Large final : Net {
  explicit Large(int layers) {
    for (int i = 0; i < layers; ++i)
      all->push_back(torch::nn::Linear(torch::nn::LinearOptions(2048, 2048).bias(false)));
    register_module("all", all);
  }
  torch::Tensor forward(torch::Tensor x) override { return all->forward(x); }
  torch::nn::Sequential all;
};

void measure_construction(const muster::World& world, int layers) {
  const std::shared_ptr<Net> net = std::make_shared<Large>(layers);
  muster::barrier();
  const auto start = std::chrono::steady_clock::now();
  const muster::DistributedDataParallel<Net> ddp(net);
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  const torch::Tensor slowest = torch::tensor(ms, torch::kDouble);
  muster::all_reduce(slowest, {.op = muster::ReduceOp::MAX});
  if (world.rank() == 0)
    std::printf(R"({"bench": "ddp_construction", "impl": "muster", "ranks": %d, "model_mib": %d, "ms": %.1f})"
                "\n",
                world.world_size(), layers * 16, slowest.item<double>());
}

struct Training {
  explicit Training(int64_t check_divergence_every)
      : ddp(work.net, muster::DdpOptions{.check_divergence_every = check_divergence_every}) {}
  void step() {
    const auto [input, target] = work.part(0, work.batch);
    sgd.zero_grad();
    work.loss(ddp.forward(input), target).backward();
    sgd.step();
  }
  bench::Workload work = bench::workload_of("transformer");
  muster::DistributedDataParallel<Net> ddp;
  muster::SGD sgd{work.net->parameters(), muster::optim::SGDOptions{.lr = 0.05, .momentum = 0.5}};
};

void measure_watch(const muster::World& world, int steps) {
  constexpr int kEvery = 10;
  Training ordinary(0), watched(1);
  const bench::Turns turns = bench::by_turns(
      steps, [&] { ordinary.step(); }, [&] { watched.step(); });
  if (world.rank() == 0)
    std::printf(R"({"bench": "ddp_watch", "net": "transformer", "impl": "muster", "ranks": %d, "every": %d, )"
                R"("ms_ordinary": %.2f, "ms_checking": %.2f, "share": %.4f})"
                "\n",
                world.world_size(), kEvery, turns.ms, turns.ms_other, turns.share / kEvery);
}

}  // namespace

int main(int argc, char** argv) {
  int layers = 32, steps = 11;
  CLI::App app{"What DistributedDataParallel costs besides the synchronisation of a step"};
  auto* const construction = app.add_subcommand("construction", "milliseconds to construct it, of the slowest rank");
  construction->add_option("--layers", layers, "of 16 MiB each");
  auto* const watch = app.add_subcommand("watch", "a step of a transformer with and without the divergence watch");
  watch->add_option("--steps", steps, "of each kind");
  app.require_subcommand(1);
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(1);
  const auto world = muster::init();
  torch::manual_seed(world.rank());
  if (construction->parsed()) measure_construction(world, layers);
  if (watch->parsed()) measure_watch(world, steps);
}
