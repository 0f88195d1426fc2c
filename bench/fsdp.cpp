// Steps of a transformer whose ranks share one model: muster run -n 2 bench_fsdp [--sync fsdp|full|ddp|barrier|none].
// One JSON object: milliseconds per step, and the memory of the host: each process's private pages and its share of the
// pages that several map (PSS), summed, and that of the rank that has most; peak_mib: the largest resident sets, summed,
// where shared pages count for each. With --vocabulary, an embedding comes first; --rows: its rows have owners.
// With `barrier`, a barrier after each step is all that connects the ranks, and each rank updates all parameters. The
// data are random: the time of a step does not depend on the values. With --device, `fsdp` keeps parameters and states
// on the CPU and computes on the device (device_mib: the most that this rank had there), and `none` has everything
// there.
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "memory.h"
#include "muster/muster.h"
#include "muster/optim/optimizers.h"
#include "nets.h"

using Net = bench::Transformer;

// The field of the row that says how much of the device's memory was in use; none for the CPU.
static std::string of_device(const torch::Device& device) {
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (!allocator) return "";
  const auto index = device.has_index() ? device.index() : c10::DeviceIndex{0};
  const int64_t bytes = allocator->getDeviceStats(index).allocated_bytes[0].peak;
  return R"("device": ")" + device.str() + R"(", "device_mib": )" + std::to_string(bytes >> 20) + ", ";
}

int main(int argc, char** argv) {
  std::string sync = "fsdp";
  int steps = 10, blocks = 8, batch = 4, length = 64;
  CLI::App app{"Steps of a transformer whose ranks share one model"};
  app.add_option("--steps", steps);
  app.add_option("--blocks", blocks, "encoder layers of 3.15 million parameters");
  app.add_option("--batch", batch, "sequences per rank");
  app.add_option("--length", length, "of a sequence");
  app.add_option("--sync", sync, "what connects the ranks")
      ->check(CLI::IsMember({"fsdp", "full", "ddp", "barrier", "none"}));
  bool checkpointed = false, mixed = false;
  app.add_flag("--mixed", mixed, "compute in bfloat16, with gradients reduced in float32 (sharded only)");
  app.add_flag("--checkpoint", checkpointed, "compute activations again in backward");
  std::string device_name = "cpu";
  int threads = 1;
  app.add_option("--device", device_name, "that computes, such as cuda");
  app.add_option("--threads", threads, "of the CPU's operators, per rank");
  std::vector<std::string> kept;
  app.add_option("--keep", kept, "with --checkpoint: operators whose results are kept, such as aten::addmm");
  int64_t vocabulary = 0;
  double rows_mb = 0;
  app.add_option("--vocabulary", vocabulary, "words of an embedding of width 512; 0: there is none");
  app.add_option("--rows", rows_mb, "parameters above this many MiB are owned by rows; 0: none is");
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(threads);
  auto world = muster::init();
  torch::manual_seed(0);
  const auto net = std::make_shared<Net>(blocks, vocabulary);
  const torch::Device device(device_name);
  if (sync != "fsdp" && sync != "full") net->to(device);
  if (checkpointed) net->checkpoint.emplace();
  if (checkpointed && !kept.empty())
    net->checkpoint->keep = [&](std::string_view operation) {
      return std::find(kept.begin(), kept.end(), operation) != kept.end();
    };
  std::unique_ptr<muster::DistributedDataParallel<Net>> ddp;
  std::unique_ptr<muster::FullyShardedDataParallel<Net>> fsdp;
  if (sync == "ddp") ddp = std::make_unique<muster::DistributedDataParallel<Net>>(net);
  muster::FsdpOptions options;
  if (mixed) options.mixed_precision = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat};
  if (!device.is_cpu()) options.compute_device = device;
  if (sync == "full" || !device.is_cpu()) {
    if (sync == "full") options.strategy = muster::ShardingStrategy::kFullShard;
    options.is_unit = [](const torch::nn::Module& module) {
      return dynamic_cast<const torch::nn::TransformerEncoderLayerImpl*>(&module) != nullptr;
    };
  }
  if (rows_mb > 0) options.divide_above_mb = rows_mb;
  if (sync == "fsdp" || sync == "full") fsdp = std::make_unique<muster::FullyShardedDataParallel<Net>>(net, options);
  muster::AdamW optimizer(fsdp ? fsdp->parameters() : net->parameters(), {.lr = 1e-4});
  torch::manual_seed(5 + world.rank());
  const auto x =
      (vocabulary > 0 ? torch::randint(vocabulary, {length, batch}) : torch::randn({length, batch, 512})).to(device);

  constexpr int kWarmup = 2;
  double loss_of_last = 0;
  std::chrono::steady_clock::time_point start;
  for (int step = 0; step < steps + kWarmup; ++step) {
    if (step == kWarmup) {
      muster::barrier();
      start = std::chrono::steady_clock::now();
    }
    optimizer.zero_grad();
    const auto loss = (fsdp ? fsdp->forward(x) : ddp ? ddp->forward(x) : net->forward(x)).square().mean();
    loss.backward();
    optimizer.step();
    if (sync == "barrier") muster::barrier();
    loss_of_last = loss.item<double>();
  }
  muster::barrier();
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() / steps;
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const double of_rank = bench::proportional_set_size();
  auto memory = torch::tensor({of_rank, static_cast<double>(usage.ru_maxrss) / 1024}, torch::kDouble);
  auto most = torch::tensor({of_rank}, torch::kDouble);
  muster::all_reduce(memory);
  muster::all_reduce(most, {.op = muster::ReduceOp::MAX});
  muster::barrier();
  if (world.rank() == 0) {
    int64_t parameters = 0;
    for (const auto& parameter : net->parameters()) parameters += parameter.numel();
    std::printf(
        R"({"bench": "fsdp", "impl": "muster-%s%s%s%s", "ranks": %d, "parameters": %lld, "tokens": %d, "ms": %.1f, )"
        R"("vocabulary": %lld, "host_mib": %.0f, "rank_mib": %.0f, "peak_mib": %.0f, %s"loss": %.6f})"
        "\n",
        sync.c_str(), mixed ? "-mixed" : "", checkpointed ? kept.empty() ? "-checkpoint" : "-checkpoint-keep" : "",
        rows_mb > 0 ? "-rows" : "", world.world_size(), static_cast<long long>(parameters), batch * length, ms,
        static_cast<long long>(vocabulary), memory[0].item<double>(), most.item<double>(), memory[1].item<double>(),
        of_device(device).c_str(), loss_of_last);
  }
}
