// FullyShardedDataParallel on the models of support/models.h.
#include <torch/optim/adam.h>

#include <memory>
#include <stdexcept>

#include "multiprocess/fsdp_support.h"
#include "support/models.h"

namespace muster::test {
namespace {

TEST(FsdpModels, ResNet18) { expect_as_alone<FullyShardedDataParallel, ResNet18>({.rate = 0.05}); }
TEST(FsdpModels, WideConvolutions) { expect_as_alone<FullyShardedDataParallel, WideConvolutions>({.rate = 1e-3}); }
TEST(FsdpModels, TransformerWithTiedEmbeddings) { expect_as_alone<FullyShardedDataParallel, Transformer>(); }
TEST(FsdpModels, TwoLayersOfLstm) { expect_as_alone<FullyShardedDataParallel, Recurrent>({.rate = 0.5}); }
TEST(FsdpModels, FrozenUnusedSharedAndEmptyParameters) {
  expect_as_alone<FullyShardedDataParallel, Mixed>({.rate = 0.5, .find_unused_parameters = true});
}
TEST(FsdpModels, InBFloat16) {
  const Prepare halved = [](nn::Module& net) { net.to(torch::kBFloat16); };
  expect_as_alone<FullyShardedDataParallel, WideConvolutions>(
      {.prepare = halved, .rate = 4e-3, .tolerance = {.moved = 0.05}});
}
TEST(FsdpModels, ChannelsLast) {
  const Prepare last = [](nn::Module& net) {
    for (auto& parameter : net.parameters())
      if (parameter.dim() == 4) parameter.set_data(parameter.contiguous(torch::MemoryFormat::ChannelsLast));
  };
  expect_as_alone<FullyShardedDataParallel, WideConvolutions>({.prepare = last, .rate = 1e-3});
}
TEST(FsdpModels, WithTheAllocatorLeftAlone) {
  expect_as_alone<FullyShardedDataParallel, WideConvolutions>({.rate = 1e-3, .replace_allocator = false});
}

// Over two hosts, parameters are gathered.
TEST(FsdpModels, ResNet18Gathered) { expect_as_alone<FullyGathered, ResNet18>({.rate = 0.05, .hosts = kApart}); }
TEST(FsdpModels, TransformerGathered) { expect_as_alone<FullyGathered, Transformer>({.hosts = kApart}); }
TEST(FsdpModels, LstmGathered) { expect_as_alone<FullyGathered, Recurrent>({.rate = 0.5, .hosts = kApart}); }
TEST(FsdpModels, BFloat16Gathered) {
  const Prepare halved = [](nn::Module& net) { net.to(torch::kBFloat16); };
  expect_as_alone<FullyGathered, WideConvolutions>(
      {.prepare = halved, .rate = 4e-3, .tolerance = {.apart = 0.1, .moved = 0.05}, .hosts = kApart});
}

// On any number of ranks, steps are those of DistributedDataParallel to the bit: the same sums in the same order, and
// the same update of each parameter, only on one rank.
template <typename Net>
void expect_steps_of_ddp_on(const HostOfRank& hosts, int steps, const FsdpOptions& options) {
  SCOPED_TRACE(testing::PrintToString(hosts));
  on_hosts(hosts, [&](World& world) {
    const auto train = [&](auto& model, Net& net) {
      torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(1e-3));
      for (int step = 0; step < steps; ++step) {
        optimizer.zero_grad();
        model(world.rank(), step).backward();
        optimizer.step();
      }
      return optimizer.state().size();
    };
    const auto net = make<Net>(7, {}), other = make<Net>(7, {});
    DistributedDataParallel ddp(net);
    train(ddp, *net);
    auto fsdp = fully_shard(other, options);
    const auto states = train(fsdp, *other);
    EXPECT_EQ(states, fsdp.owned_parameters().size());
    fsdp.gather();
    expect_equal(*other, *net);
    fsdp.synchronize();
  });
}
template <typename Net>
void expect_steps_of_ddp(int steps) {
  for (const int ranks : full_run() ? std::vector{1, 2, 3, 4} : std::vector{3})
    expect_steps_of_ddp_on<Net>(HostOfRank(static_cast<size_t>(ranks), "host"), steps, {});
  expect_steps_of_ddp_on<Net>({"a", "a", "b"}, steps, {.strategy = ShardingStrategy::kFullShard, .unit_cap_mb = 1});
}
TEST(FsdpModels, StepsOfTheTransformerAreThoseOfDdp) { expect_steps_of_ddp<Transformer>(full_run() ? 50 : 3); }
TEST(FsdpModels, StepsOfTheLstmAreThoseOfDdp) { expect_steps_of_ddp<Recurrent>(full_run() ? 50 : 2); }
TEST(FsdpModels, StepsOfResNet18AreThoseOfDdp) { expect_steps_of_ddp<ResNet18>(full_run() ? 20 : 1); }

// Two models, three backward passes in a step, of which one goes through both.
void expect_gan_of_ddp(const HostOfRank& hosts, const FsdpOptions& options) {
  on_hosts(hosts, [&](World& world) {
    const auto train = [&](auto& generator, auto& discriminator, Generator& g, Discriminator& d) {
      torch::optim::Adam of_g(g.parameters(), 1e-3), of_d(d.parameters(), 1e-3);
      const GanLosses losses{[&](const Tensor& z) { return generator(z); },
                             [&](const Tensor& x) { return discriminator(x); }};
      for (int step = 0; step < 3; ++step) {
        of_d.zero_grad();
        losses.real(world.rank(), step).backward();
        losses.fake(world.rank(), step).backward();
        of_d.step();
        of_g.zero_grad();
        of_d.zero_grad();
        losses.deceived(world.rank(), step).backward();
        of_g.step();
      }
    };
    const auto g = make<Generator>(7, {}), g_sharded = make<Generator>(7, {});
    const auto d = make<Discriminator>(8, {}), d_sharded = make<Discriminator>(8, {});
    const Values before_g = copies(g->named_parameters()), before_d = copies(d->named_parameters());
    DistributedDataParallel ddp_g(g);
    DistributedDataParallel ddp_d(d);
    train(ddp_g, ddp_d, *g, *d);
    auto fsdp_g = fully_shard(g_sharded, options);
    auto fsdp_d = fully_shard(d_sharded, options);
    train(fsdp_g, fsdp_d, *g_sharded, *d_sharded);
    fsdp_g.gather();
    fsdp_d.gather();
    expect_close(*g_sharded, *g, before_g, kAmplified);
    expect_close(*d_sharded, *d, before_d, kAmplified);
    barrier();
  });
}
TEST(FsdpModels, Gan) { expect_gan_of_ddp({"host", "host"}, {}); }
TEST(FsdpModels, GanGathered) {
  expect_gan_of_ddp(kApart, {.strategy = ShardingStrategy::kFullShard, .unit_cap_mb = 0.1});
}

}  // namespace
}  // namespace muster::test
