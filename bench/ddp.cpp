// Data-parallel training over Muster. One JSON object.
//
//   muster run -n 2 bench_ddp --net small|resnet18|transformer|wide [--sync ddp|barrier|none] [--bucket-mb 4]
//                             [--hook power] [--shards 8] [--optimizer adamw|zero|zero-backward] [--device cuda]
//
// With `barrier`, a barrier after each step is all that connects the ranks: no synchronisation can be faster, because
// each step takes as long as the slower rank's. With --shards, gradients are the same to the bit on any number of
// ranks; the batches of all ranks together are what is divided. With an --optimizer, the row has the bytes of the
// optimizer states of all ranks together; `zero` divides AdamW's among the ranks, and `zero-backward` makes its steps
// in backward(). With --device cuda, all ranks are on the first device, over NCCL. host_mib: the memory in use by
// all ranks together after the last step (memory.h). The data are random: the time of a step does not depend on the
// values.
#include <ATen/Parallel.h>
#include <torch/nn.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "memory.h"
#include "muster/muster.h"
#include "muster/optim/optimizers.h"
#include "nets.h"

namespace {

using bench::Net;
using Optimizer = std::unique_ptr<torch::optim::Optimizer>;

Optimizer make_optimizer(const std::string& name, Net& net, muster::DistributedDataParallel<Net>* ddp) {
  const muster::optim::AdamWOptions adamw{.lr = 1e-3};
  if (name == "sgd")
    return std::make_unique<muster::SGD>(net.parameters(), muster::optim::SGDOptions{.lr = 0.05, .momentum = 0.5});
  if (name == "adamw") return std::make_unique<muster::AdamW>(net.parameters(), adamw);
  auto zero = std::make_unique<muster::ZeroRedundancyOptimizer<muster::AdamW>>(net.parameters(), adamw);
  if (name == "zero-backward") ddp->register_comm_hook(zero->step_in_backward());
  return zero;
}

int64_t state_bytes(torch::optim::Optimizer& optimizer) {
  int64_t bytes = 0;
  for (const auto& [parameter, state] : optimizer.state())
    if (const auto* const adamw = dynamic_cast<muster::optim::KeptState*>(state.get()))
      for (const torch::Tensor& kept : adamw->values.kept)
        if (kept.defined()) bytes += static_cast<int64_t>(kept.nbytes());
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  std::string name = "small", sync = "ddp", hook = "none", chosen = "sgd", device = "cpu";
  int steps = 200, batch = 0, warmup = 20, shards = 0;
  muster::DdpOptions options;
  CLI::App app{"Data-parallel training over Muster"};
  app.add_option("--net", name)->check(CLI::IsMember({"small", "resnet18", "transformer", "wide"}));
  app.add_option("--steps", steps);
  app.add_option("--batch", batch, "samples of each rank and step; 0: 64, of resnet18 8, of transformer 4");
  app.add_option("--sync", sync, "what connects the ranks: DDP, a barrier per step, or nothing")
      ->check(CLI::IsMember({"ddp", "barrier", "none"}));
  app.add_option("--bucket-mb", options.bucket_cap_mb,
                 "MiB of a bucket of small gradients, and at most of the first one; default: as measured");
  app.add_option("--hook", hook, "a communication hook: PowerSGD of rank 2, or bfloat16")
      ->check(CLI::IsMember({"none", "power", "bf16"}));
  app.add_option("--shards", shards, "of the global batch, with reproducible gradients; 0: as usual");
  app.add_option("--optimizer", chosen)->check(CLI::IsMember({"sgd", "adamw", "zero", "zero-backward"}));
  app.add_option("--warmup", warmup, "steps that are not measured");
  app.add_option("--device", device)->check(CLI::IsMember({"cpu", "cuda"}));
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(1);
  auto world = muster::init(muster::WorldOptions{.backend = device == "cuda" ? "nccl" : "auto"});
  torch::manual_seed(0);
  bench::Workload work = bench::workload_of(name);
  work.to(device == "cuda" ? torch::Device(torch::kCUDA, 0) : torch::Device(torch::kCPU));
  const std::shared_ptr<Net>& net = work.net;
  if (batch == 0) batch = work.batch;
  std::unique_ptr<muster::DistributedDataParallel<Net>> ddp;
  if (options.bucket_cap_mb)
    options.first_bucket_cap_mb = std::min(options.first_bucket_cap_mb, *options.bucket_cap_mb);
  options.reproducible.shards = shards;
  if (sync == "ddp") ddp = std::make_unique<muster::DistributedDataParallel<Net>>(net, options);
  if (hook == "power")
    ddp->register_comm_hook(muster::comm_hooks::PowerSgd({.matrix_approximation_rank = 2, .start_iter = 2}));
  if (hook == "bf16") ddp->register_comm_hook(muster::comm_hooks::bf16_compress);
  const Optimizer optimizer = make_optimizer(chosen, *net, ddp.get());

  std::chrono::steady_clock::time_point start;
  for (int step = 0; step < steps + warmup; ++step) {
    if (step == warmup) {
      muster::barrier();
      start = std::chrono::steady_clock::now();
    }
    const int64_t first = (step * world.world_size() + world.rank()) * batch % (work.samples() - batch);
    optimizer->zero_grad();
    if (shards > 0) {
      const auto mine = ddp->shards();
      const int64_t rows = batch / static_cast<int64_t>(mine.size());
      ddp->backward_by_shards(static_cast<uint64_t>(step), [&](int shard) {
        const auto [input, target] = work.part(first + (shard - mine[0]) * rows, rows);
        return work.loss(net->forward(input), target);
      });
    } else {
      const auto [input, target] = work.part(first, batch);
      work.loss(ddp ? ddp->forward(input) : net->forward(input), target).backward();
    }
    optimizer->step();
    if (sync == "barrier") muster::barrier();
  }
  muster::barrier();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const torch::Tensor mib =
      torch::tensor({bench::proportional_set_size_in_use(), static_cast<double>(state_bytes(*optimizer)) / (1 << 20)},
                    torch::kDouble);
  muster::all_reduce(mib);
  if (world.rank() != 0) return 0;
  int64_t parameters = 0;
  for (const auto& parameter : net->parameters()) parameters += parameter.numel();
  const std::string impl = chosen != "sgd"  ? "muster-" + chosen
                           : shards > 0     ? "muster-reproducible"
                           : hook != "none" ? "muster-" + hook
                           : sync == "ddp"  ? "muster"
                           : sync == "none" ? "muster-nosync"
                                            : "muster-barrier";
  std::printf(
      R"({"bench": "ddp", "device": "%s", "net": "%s", "impl": "%s", "ranks": %d, "batch": %d, "parameters": %lld, )"
      R"("bucket_size": "%s", "bucket_mib": %g, "buckets": %zu, "samples_per_s": %.1f, "blocked": %.4f, "host_mib": %.1f, )"
      R"("state_mib": %.1f})"
      "\n",
      device.c_str(), name.c_str(), impl.c_str(), world.world_size(), batch, static_cast<long long>(parameters),
      options.bucket_cap_mb ? "given" : "measured", ddp ? ddp->logging_data().bucket_cap_mb : 0,
      ddp ? ddp->bucket_names().size() : 0, steps * batch * world.world_size() / seconds,
      std::chrono::duration<double>(world.group().stats().blocked).count() / seconds, mib[0].item<double>(),
      mib[1].item<double>());
}
