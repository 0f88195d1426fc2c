// Data-parallel training over Muster. One JSON object.
//
//   muster run -n 2 bench_ddp --net small|wide [--sync ddp|barrier|none] [--hook power] [--shards 8]
//                             [--optimizer adamw|zero|zero-backward] [--device cuda]
//
// With `barrier`, a barrier after each step is all that connects the ranks: no synchronisation can be faster, because
// each step takes as long as the slower rank's. With --shards, gradients are the same to the bit on any number of ranks; the batches of
// all ranks together are what is divided. With an --optimizer, the row has the bytes of the optimizer states of all
// ranks together; `zero` divides AdamW's among the ranks, and `zero-backward` makes its steps in backward(). With
// --device cuda, all ranks are on the first device, over NCCL. The data are random, in Fashion-MNIST's shapes: the time
// of a step does not depend on the values.
#include <ATen/Parallel.h>
#include <torch/nn.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "muster/muster.h"
#include "muster/optim/optimizers.h"

namespace {

struct Net : torch::nn::Module {
  virtual torch::Tensor forward(torch::Tensor x) = 0;
};

struct Small final : Net {  // 21,840 parameters
  torch::nn::Conv2d conv1 = register_module("conv1", torch::nn::Conv2d(1, 10, 5));
  torch::nn::Conv2d conv2 = register_module("conv2", torch::nn::Conv2d(10, 20, 5));
  torch::nn::Linear fc1 = register_module("fc1", torch::nn::Linear(320, 50)),
                    fc2 = register_module("fc2", torch::nn::Linear(50, 10));
  torch::Tensor forward(torch::Tensor x) override {
    x = torch::relu(torch::max_pool2d(conv1(x), 2));
    x = torch::relu(torch::max_pool2d(conv2(x), 2)).flatten(1);
    return fc2(torch::relu(fc1(x)));
  }
};

struct Wide final : Net {  // 25.5 million parameters, 102 MB of gradients
  torch::nn::Linear a = register_module("a", torch::nn::Linear(784, 4096)),
                    b = register_module("b", torch::nn::Linear(4096, 4096)),
                    c = register_module("c", torch::nn::Linear(4096, 1320)),
                    d = register_module("d", torch::nn::Linear(1320, 10));
  torch::Tensor forward(torch::Tensor x) override {
    return d(torch::relu(c(torch::relu(b(torch::relu(a(x.flatten(1))))))));
  }
};

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
  const torch::Tensor all = torch::tensor(bytes);
  muster::all_reduce(all);
  return all.item<int64_t>();
}

}  // namespace

int main(int argc, char** argv) {
  std::string name = "small", sync = "ddp", hook = "none", chosen = "sgd", device = "cpu";
  int steps = 200, batch = 64, warmup = 20, shards = 0;
  CLI::App app{"Data-parallel training over Muster"};
  app.add_option("--net", name)->check(CLI::IsMember({"small", "wide"}));
  app.add_option("--steps", steps);
  app.add_option("--batch", batch);
  app.add_option("--sync", sync, "what connects the ranks: DDP, a barrier per step, or nothing")
      ->check(CLI::IsMember({"ddp", "barrier", "none"}));
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
  std::shared_ptr<Net> net;
  if (name == "small")
    net = std::make_shared<Small>();
  else
    net = std::make_shared<Wide>();
  const torch::Device place = device == "cuda" ? torch::Device(torch::kCUDA, 0) : torch::Device(torch::kCPU);
  net->to(place);
  std::unique_ptr<muster::DistributedDataParallel<Net>> ddp;
  if (sync == "ddp")
    ddp = std::make_unique<muster::DistributedDataParallel<Net>>(
        net, muster::DdpOptions{.reproducible = {.shards = shards}});
  if (hook == "power")
    ddp->register_comm_hook(muster::comm_hooks::PowerSgd({.matrix_approximation_rank = 2, .start_iter = 2}));
  if (hook == "bf16") ddp->register_comm_hook(muster::comm_hooks::bf16_compress);
  const Optimizer optimizer = make_optimizer(chosen, *net, ddp.get());
  const auto x = torch::rand({8192, 1, 28, 28}).to(place);
  const auto y = torch::randint(10, {8192}).to(place);

  std::chrono::steady_clock::time_point start;
  for (int step = 0; step < steps + warmup; ++step) {
    if (step == warmup) {
      muster::barrier();
      start = std::chrono::steady_clock::now();
    }
    const int64_t i = (step * world.world_size() + world.rank()) * batch % (x.size(0) - batch);
    const auto input = x.narrow(0, i, batch), target = y.narrow(0, i, batch);
    optimizer->zero_grad();
    if (shards > 0) {
      const auto mine = ddp->shards();
      const int64_t rows = batch / static_cast<int64_t>(mine.size());
      ddp->backward_by_shards(static_cast<uint64_t>(step), [&](int shard) {
        const int64_t at = (shard - mine[0]) * rows;
        return torch::nn::functional::cross_entropy(net->forward(input.narrow(0, at, rows)),
                                                    target.narrow(0, at, rows));
      });
    } else {
      const auto output = ddp ? ddp->forward(input) : net->forward(input);
      torch::nn::functional::cross_entropy(output, target).backward();
    }
    optimizer->step();
    if (sync == "barrier") muster::barrier();
  }
  muster::barrier();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const int64_t states = state_bytes(*optimizer);
  if (world.rank() == 0)
    std::printf(
        R"({"bench": "ddp", "device": "%s", "net": "%s", "impl": "%s", "ranks": %d, "samples_per_s": %.1f, "blocked": %.4f, )"
        R"("state_mib": %.1f})"
        "\n",
        device.c_str(), name.c_str(),
        chosen != "sgd"  ? ("muster-" + chosen).c_str()
        : shards > 0     ? "muster-reproducible"
        : hook != "none" ? ("muster-" + hook).c_str()
        : sync == "ddp"  ? "muster"
        : sync == "none" ? "muster-nosync"
                         : "muster-barrier",
        world.world_size(), steps * batch * world.world_size() / seconds,
        std::chrono::duration<double>(world.group().stats().blocked).count() / seconds,
        static_cast<double>(states) / (1 << 20));
}
