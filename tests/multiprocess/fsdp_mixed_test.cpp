// FullyShardedDataParallel in mixed precision.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "base/text.h"
#include "multiprocess/mixed_support.h"
#include "shm/mapping.h"

namespace muster::test {
namespace {

FsdpOptions with(MixedPrecision precision, FsdpOptions options = {}) {
  options.mixed_precision = std::move(precision);
  return options;
}

// For mixed_support.h.
auto sharded(const FsdpOptions& options) {
  return [options](auto net, MixedPrecision precision) {
    return fully_shard(std::move(net), with(std::move(precision), options));
  };
}

TEST(FsdpMixed, StepsAreThoseOfACopyInFewerBits) {
  for (const HostOfRank& hosts : {HostOfRank{"a"}, HostOfRank{"a", "a"}, kTwoEach})
    for (const FsdpOptions& options : {FsdpOptions{}, full(), full({.unit_cap_mb = 1e-6, .max_gathered_units = 2})})
      expect_steps_of_such_a_copy<FsdpNet>(hosts, kBFloat16, sharded(options), kLossOfFsdpNet);
}

TEST(FsdpMixed, Models) {
  for (const FsdpOptions& options : {FsdpOptions{}, full({.unit_cap_mb = 0.1})}) expect_models(sharded(options));
}

TEST(FsdpMixed, DtypesOfArgumentsParametersBuffersAndResults) {
  on_hosts(kApart, [](World&) {
    for (const FsdpOptions& strategy : {FsdpOptions{}, full()}) expect_dtypes(sharded(strategy));
  });
}

TEST(FsdpMixed, PartsWithDtypesOfTheirOwn) {
  for (const FsdpOptions& strategy : {FsdpOptions{}, full()}) expect_parts_with_their_own(sharded(strategy));
}

TEST(FsdpMixed, GradientsOfALayerInFewerBitsOnTheirWay) {
  for (const FsdpOptions& strategy : {FsdpOptions{}, full()})
    expect_gradients_of_a_layer_in_fewer_bits(sharded(strategy));
}

TEST(FsdpMixed, EvaluationOutsideOfForwardHasTheParametersThemselves) {
  on_hosts(kTwoEach, [](World& world) {
    for (const FsdpOptions& strategy : {FsdpOptions{}, full()})
      expect_values_in_forward_and_outside(world, with(kBFloat16, strategy), torch::kBFloat16);
  });
}

TEST(FsdpMixed, EveryKindOfStep) {
  on_hosts(kTwoEach, [](World& world) {
    for (const FsdpOptions& strategy : {FsdpOptions{}, full()}) expect_every_kind_of_step(world, sharded(strategy));
  });
}

TEST(FsdpMixed, AnOldGraphDoesNotUseNewValues) {
  on_ranks(2, [](World& world) { expect_old_graphs_to_fail(world, with(kBFloat16)); });
}

// What is made of the module between two synchronize() is its own, also in backward().
TEST(FsdpMixed, GraphsOfTheModuleItself) {
  on_ranks(2, [](World& world) {
    const auto net = make<Smooth>(7, {}), other = make<Smooth>(7, {});
    auto model = fully_shard(net, with(kBFloat16));
    const auto expect_same = [&] {
      const auto slope = [&](Smooth& of, bool again) {
        const Tensor x = fsdp_input(world.rank(), 0).requires_grad_();
        const Tensor y = again ? activation_checkpoint(
                                     kNoRandomNumbers, [&](const Tensor& at) { return of.forward(at); }, x)
                               : of.forward(x);
        return torch::autograd::grad({y.sum()}, {x})[0];
      };
      for (const bool again : {false, true})
        EXPECT_TRUE(torch::allclose(slope(*net, again), slope(*other, again), 1e-5, 1e-6));
    };
    expect_same();
    model(fsdp_input(world.rank(), 0)).sum().backward();
    model.synchronize();
    expect_same();
    model(fsdp_input(world.rank(), 0));
    model.synchronize();
    expect_same();
  });
}

TEST(FsdpMixed, NothingChangesACopyOrTakesItsValuesForTheParameters) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    auto model = std::make_unique<FullyShardedDataParallel<FsdpNet>>(net, with(kBFloat16));
    const auto x = [&] { return fsdp_input(world.rank(), 0); };
    model->forward(x());
    expect_refusal({"change the copy of parameter b.weight", "clone()"},
                   [&] { net->b->weight.to(torch::kBFloat16).mul_(2); });
    expect_refusal({"change the copy of parameter b.weight"}, [&] {
      const torch::NoGradGuard no_grad;
      net->b->weight.to(torch::kBFloat16).view({-1}).zero_();
    });
    net->to(torch::kFloat);
    expect_refusal({"after a forward() that no backward() followed"}, [&] { model->forward(x()); });
    model->synchronize();
    for (const auto& item : other->named_parameters())
      net->named_parameters()[item.key()].set_data(item.value().clone());
    model->forward(x());
    model->synchronize();
    expect_equal(*net, *other);
    // Another one over the same module, while operators use copies.
    model->forward(x());
    model = std::make_unique<FullyShardedDataParallel<FsdpNet>>(net);
    model->forward(x());
    model->synchronize();
    expect_equal(*net, *other);
  });
}

TEST(FsdpMixed, TheModuleOutlivesIt) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    const Tensor x = fsdp_input(world.rank(), 0);
    {
      auto model = fully_shard(net, with(kBFloat16));
      model(x).sum().backward();
      model.synchronize();
    }
    EXPECT_TRUE(torch::equal(net->forward(x), other->forward(x)));
    barrier();
  });
}

struct Anything : nn::Module {
  void forward(std::vector<Tensor>& cache, std::unique_ptr<int> number, const std::vector<int64_t>&) {
    cache.push_back(a->weight + *number);
  }
  std::pair<Tensor, std::unique_ptr<int>> forward(std::pair<const int, Tensor> x, Tensor& y) {
    return {x.second + y + a->bias, nullptr};
  }
  nn::Linear a = register_module("a", nn::Linear(2, 2));
};

TEST(FsdpMixed, ArgumentsAndResultsOfEveryKind) {
  on_ranks(1, [](World&) {
    for (const bool mixed : {false, true}) {
      FsdpOptions options;
      if (mixed) options = with(kBFloat16);
      const auto dtype = mixed ? torch::kBFloat16 : torch::kFloat;
      auto model = fully_shard(std::make_shared<Anything>(), options);
      std::vector<Tensor> cache;
      for (int i = 0; i < 2; ++i) model(cache, std::make_unique<int>(1), std::vector<int64_t>{1});
      ASSERT_EQ(cache.size(), 2u);
      EXPECT_EQ(cache[1].scalar_type(), dtype);
      Tensor y = torch::ones({2});
      EXPECT_EQ(model(std::pair<const int, Tensor>(1, torch::ones({2})), y).first.scalar_type(), torch::kFloat);
      model.synchronize();
    }
  });
}

TEST(FsdpMixed, GradientsInAnotherDtypeOnTheirWay) {
  for (const HostOfRank& hosts : {HostOfRank{"a", "a"}, kTwoEach})
    for (const FsdpOptions& strategy : {FsdpOptions{}, full()})
      on_hosts(hosts, [&](World& world) {
        const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
        auto model = fully_shard(net, with({.reduce_dtype = torch::kBFloat16}, strategy));
        auto exact = fully_shard(other, strategy);
        for (int step = 0; step < 3; ++step) {  // accumulates
          model(fsdp_input(world.rank(), step)).square().sum().backward();
          exact(fsdp_input(world.rank(), step)).square().sum().backward();
          for (const auto& item : net->named_parameters()) {
            const Tensor &grad = item.value().grad(), &expected = other->named_parameters()[item.key()].grad();
            ASSERT_EQ(grad.defined(), expected.defined());
            if (!grad.defined()) continue;
            EXPECT_EQ(grad.scalar_type(), torch::kFloat);
            EXPECT_LE((grad - expected).norm().item<double>(), 0.02 * expected.norm().item<double>());
            const bool is_short = torch::equal(grad, grad.to(torch::kBFloat16).to(torch::kFloat));
            EXPECT_EQ(is_short, step == 0 && hosts.size() > 2);
            EXPECT_EQ(torch::equal(grad, expected), hosts.size() == 2);  // on one host, nothing travels
          }
        }
      });
}

TEST(FsdpMixed, AHostGathersCopiesOnly) {
  on_hosts(kApart, [](World& world) {
    const auto net = make<Chain>(7, {});
    auto model = fully_shard(net, with(kBFloat16, full({.is_unit = is_linear})));
    const size_t page = shm::page_size(), copy = 256 * 256 * 2 + page, own = model.bytes_here();
    EXPECT_EQ(own, (256 * 256 * 4 + page + copy) * Chain::kLayers / 2);
    size_t most = 0;
    net->at_layer = [&] { most = std::max(most, model.bytes_here()); };
    for (int step = 0; step < 3; ++step) {
      model.forward(drawn(world.rank(), step, {2, 256})).sum().backward();
      EXPECT_EQ(model.bytes_here(), own);
    }
    EXPECT_EQ(most, own + 2 * copy);
  });
}

TEST(FsdpMixed, SnapshotsHaveTheParameters) {
  const auto folder = std::filesystem::path(testing::TempDir()) / text("fsdp-mixed-", ::getpid());
  for (const FsdpOptions& strategy : {FsdpOptions{}, full()}) {
    for (const bool again : {false, true})
      on_hosts(kTwoEach, [&](World& world) {
        const auto net = make<FsdpNet>(again ? 8 : 7, {}), expected = make<FsdpNet>(7, {});
        auto model = fully_shard(net, with(kBFloat16, strategy));
        Snapshot snapshot({.folder = folder, .default_generator = false});
        snapshot.add("model", net);
        EXPECT_EQ(snapshot.restore(), again ? 1 : 0);
        model(fsdp_input(world.rank(), 0));
        if (!again) snapshot.save(1);  // between forward() and backward()
        model.gather();
        expect_equal(*net, *expected);
        model.synchronize();
      });
    std::filesystem::remove_all(folder);
  }
}

TEST(FsdpMixed, AModelThatOnePrecisionDoesNotFit) {
  on_ranks(2, [](World& world) {
    expect_refusal({"mixed_precision.param_dtype: expected BFloat16, Half, Float or Double, got Long", "kBFloat16"},
                   [] { fully_shard(make<FsdpNet>(7, {}), with({.param_dtype = torch::kLong})); });
    const bool first = world.rank() == 0;
    const auto expect_mismatch = [](const MixedPrecision& mine) {
      EXPECT_CONTAINS(message_of<Mismatch>([&] { fully_shard(make<FsdpNet>(7, {}), with(mine)); }), "differs");
    };
    expect_mismatch({.param_dtype = first ? torch::kBFloat16 : torch::kHalf});
    expect_mismatch({.param_dtype = torch::kHalf, .cast_forward_inputs = first});
    expect_mismatch({.output_dtype = first ? torch::kHalf : torch::kFloat});
    expect_mismatch({.of_module = [first](const nn::Module&) -> std::optional<ModulePrecision> {
      return ModulePrecision{.reduce_dtype = first ? torch::kHalf : torch::kBFloat16};
    }});
    expect_refusal({"param_dtype", "Long"}, [] {
      fully_shard(make<FsdpNet>(7, {}), with({.of_module = [](const nn::Module&) -> std::optional<ModulePrecision> {
                    return ModulePrecision{.param_dtype = torch::kLong};
                  }}));
    });
  });
}

}  // namespace
}  // namespace muster::test
