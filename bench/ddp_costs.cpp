// What DistributedDataParallel costs besides the synchronisation of a step. One JSON object.
//
//   muster run -n 2 bench_ddp_costs construction      milliseconds to construct it, of the slowest rank
//   muster run -n 2 bench_ddp_costs watch             a step with DdpOptions::check_divergence_every, and one without
//   muster run -n 2 bench_ddp_costs share --net wide  a step, and one with a barrier in the place of the averages
//
// For `share`, two nets take steps by turns, so that both meet the same state of the machine. The figure is the part of
// the speed with a barrier that is left with averages: nothing that connects the ranks can be faster than a barrier.
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
#include <optional>
#include <string>

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
  // Without options, without averages.
  Training(const std::string& name, std::optional<muster::DdpOptions> options) : work(bench::workload_of(name)) {
    if (options) ddp.emplace(work.net, *options);
  }
  void step() {
    const auto [input, target] = work.part(0, work.batch);
    sgd.zero_grad();
    work.loss(ddp ? ddp->forward(input) : work.net->forward(input), target).backward();
    sgd.step();
  }
  bench::Workload work;
  std::optional<muster::DistributedDataParallel<Net>> ddp;
  muster::SGD sgd{work.net->parameters(), muster::optim::SGDOptions{.lr = 0.05, .momentum = 0.5}};
};

void measure_watch(const muster::World& world, int steps) {
  constexpr int kEvery = 10;
  Training ordinary("transformer", muster::DdpOptions{}),
      watched("transformer", muster::DdpOptions{.check_divergence_every = 1});
  const bench::Turns turns = bench::by_turns(
      steps, [&] { ordinary.step(); }, [&] { watched.step(); });
  if (world.rank() == 0)
    std::printf(R"({"bench": "ddp_watch", "net": "transformer", "impl": "muster", "ranks": %d, "every": %d, )"
                R"("ms_ordinary": %.2f, "ms_checking": %.2f, "share": %.4f})"
                "\n",
                world.world_size(), kEvery, turns.ms, turns.ms_other, turns.share / kEvery);
}

void measure_share(const muster::World& world, const std::string& net, int steps) {
  Training with_barrier(net, {}), with_averages(net, muster::DdpOptions{});
  const bench::Turns turns = bench::by_turns(  // which has the barriers
      steps, [&] { with_barrier.step(); }, [&] { with_averages.step(); });
  if (world.rank() == 0)
    std::printf(
        R"({"bench": "ddp_share", "net": "%s", "impl": "muster", "ranks": %d, "steps": %d, "ms_barrier": %.3f, )"
        R"("ms": %.3f, "share": %.4f})"
        "\n",
        net.c_str(), world.world_size(), steps, turns.ms, turns.ms_other, 1 / (1 + turns.share));
}

}  // namespace

int main(int argc, char** argv) {
  int layers = 32, steps = 11;
  CLI::App app{"What DistributedDataParallel costs besides the synchronisation of a step"};
  auto* const construction = app.add_subcommand("construction", "milliseconds to construct it, of the slowest rank");
  construction->add_option("--layers", layers, "of 16 MiB each");
  auto* const watch = app.add_subcommand("watch", "a step of a transformer with and without the divergence watch");
  watch->add_option("--steps", steps, "of each kind");
  auto* const share = app.add_subcommand("share", "a step, and one with a barrier in the place of the averages");
  std::string net = "small";
  share->add_option("--steps", steps, "of each kind");
  share->add_option("--net", net)->check(CLI::IsMember({"small", "resnet18", "transformer", "wide"}));
  app.require_subcommand(1);
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(1);
  const auto world = muster::init();
  torch::manual_seed(world.rank());
  if (construction->parsed()) measure_construction(world, layers);
  if (watch->parsed()) measure_watch(world, steps);
  if (share->parsed()) measure_share(world, net, steps);
}
