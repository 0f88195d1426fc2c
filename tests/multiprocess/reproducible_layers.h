// A net with synchronized batch norms for tests of DdpOptions::reproducible.
#pragma once

#include <memory>

#include "multiprocess/reproducible_fixture.h"
#include "multiprocess/sync_batch_norm_fixture.h"

namespace muster::test::batch_norms {

constexpr int kShards = 4;

inline DdpOptions by_shards(int shards = kShards) { return {.reproducible = {.shards = shards}}; }

// Parts of the net whose calls a test chooses.
struct Layers : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(4, 3)), b = register_module("b", nn::Linear(4, 6));
  SyncBatchNorm narrow{nullptr}, again{nullptr}, wide{nullptr};
  Tensor code = register_buffer("code", torch::zeros({3}));
  explicit Layers(const Group& group = {}) {
    narrow = register_module("narrow", SyncBatchNorm(nn::BatchNormOptions(3), group));
    again = register_module("again", SyncBatchNorm(nn::BatchNormOptions(3), group));
    wide = register_module("wide", SyncBatchNorm(nn::BatchNormOptions(6), group));
  }
  static Tensor input(int shard) { return torch::sin(torch::arange(20.).view({5, 4}) + shard); }
  Tensor forward(int shard) {
    return (narrow(a(input(shard))) + again(input(shard).slice(1, 1))).pow(3).sum() +
           wide(b(input(shard))).pow(3).sum();
  }
};

inline std::shared_ptr<Layers> make_layers(const Group& group = {}) {
  auto net = std::make_shared<Layers>(group);
  const torch::NoGradGuard no_grad;
  for (Tensor& parameter : net->parameters())
    parameter.copy_(torch::cos(torch::arange(1., parameter.numel() + 1)).view(parameter.sizes()));
  return net;
}

// As what is left when a step fails: nothing has changed, no thread waits, and the next step is a usual one.
inline void expect_usual_step(DistributedDataParallel<Layers>& ddp) {
  EXPECT_TRUE(torch::equal(ddp->narrow->running_mean, torch::zeros({3})));
  EXPECT_FALSE(ddp->a->weight.grad().defined());
  ddp.backward_by_shards(0, [&](int shard) { return ddp->forward(shard); });
  EXPECT_FALSE(torch::equal(ddp->narrow->running_mean, torch::zeros({3})));
  EXPECT_TRUE(ddp->a->weight.grad().defined());
}

}  // namespace muster::test::batch_norms
