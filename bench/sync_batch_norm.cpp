// What synchronized batch norms cost: muster run -n 2 bench_sync_batch_norm. One JSON object.
// Two ResNet-18 under DistributedDataParallel take steps by turns, one with BatchNorm, one converted, so that both meet
// the same state of the machine. `share`: how much longer the converted one's step is, as the median over pairs of
// steps. With --shards, both take reproducible steps.
#include <ATen/Parallel.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <memory>

#include "muster/muster.h"
#include "support/resnet18.h"
#include "turns.h"

namespace {

namespace nn = torch::nn;
using torch::Tensor;

struct ResNet18 : nn::Module {
  Tensor forward(const Tensor& x) { return layers->forward(x); }
  nn::Sequential layers = register_module("layers", muster::test::resnet18());
};

struct Training {
  Training(bool convert, int shards) {
    if (convert) muster::convert_sync_batchnorm(net);
    ddp = std::make_unique<muster::DistributedDataParallel<ResNet18>>(
        net, muster::DdpOptions{.reproducible = {.shards = shards}});
  }
  void step(const Tensor& x, const Tensor& y) {
    sgd.zero_grad();
    if (const auto shards = ddp->shards(); !shards.empty()) {
      const int64_t rows = x.size(0) / static_cast<int64_t>(shards.size());
      ddp->backward_by_shards(0, [&](int shard) {
        const int64_t first = (shard - shards[0]) * rows;
        return nn::functional::cross_entropy(net->forward(x.narrow(0, first, rows)), y.narrow(0, first, rows));
      });
    } else {
      nn::functional::cross_entropy(ddp->forward(x), y).backward();
    }
    sgd.step();
  }
  std::shared_ptr<ResNet18> net = std::make_shared<ResNet18>();
  std::unique_ptr<muster::DistributedDataParallel<ResNet18>> ddp;
  torch::optim::SGD sgd{net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9)};
};

}  // namespace

int main(int argc, char** argv) {
  int steps = 21, shards = 0;
  int64_t batch = 8, side = 112;
  CLI::App app{"The cost of synchronized batch norms"};
  app.add_option("--steps", steps);
  app.add_option("--batch", batch, "images of each rank");
  app.add_option("--side", side, "pixels of an image");
  app.add_option("--shards", shards, "of the global batch, with reproducible gradients; 0: as usual");
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(1);
  auto world = muster::init();
  torch::manual_seed(world.rank());
  const Tensor x = torch::randn({batch, 3, side, side}), y = torch::randint(1000, {batch});
  Training ordinary(false, shards), converted(true, shards);
  const bench::Turns turns = bench::by_turns(
      steps, [&] { ordinary.step(x, y); }, [&] { converted.step(x, y); });
  if (world.rank() == 0)
    std::printf(
        R"({"bench": "sync_batch_norm", "net": "resnet18", "impl": "muster", "ranks": %d, "batch": %d, "side": %d, )"
        R"("shards": %d, "ms": %.2f, "ms_ordinary": %.2f, "share": %.4f})"
        "\n",
        world.world_size(), static_cast<int>(batch), static_cast<int>(side), shards, turns.ms_other, turns.ms,
        turns.share);
}
