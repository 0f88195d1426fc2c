// GradScaler has PyTorch's numbers, and all ranks decide alike; Autocast.
#include "muster/optim/grad_scaler.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "muster/optim/autocast.h"
#include "support/ask_python.h"

namespace muster::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct One {
  Tensor parameter = torch::ones({1}, torch::requires_grad());
  torch::optim::SGD sgd{{parameter}, 0.01};

  bool iterate(GradScaler& scaler, double factor) {
    sgd.zero_grad();
    scaler.scale((parameter * factor).sum()).backward();
    const bool stepped = scaler.step(sgd);
    scaler.update();
    return stepped;
  }
};

TEST(GradScaler, ScalesAreThoseOfPython) {
  struct Case {
    std::string python;
    GradScalerOptions options;
    std::string letters;
  };
  std::string many;
  for (int i = 0; i < 300; ++i) many += i % 37 == 5 ? 'i' : i % 53 == 7 ? 'n' : '.';
  const std::vector<Case> cases = {
      {"", {}, "..i.n"},
      {"init_scale=3.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=4",
       {.init_scale = 3, .growth_factor = 1.7, .backoff_factor = 0.3, .growth_interval = 4},
       many},
      {"init_scale=1000.1", {.init_scale = 1000.1}, "..i."},
      {"init_scale=2.0**100, growth_interval=1", {.init_scale = std::pow(2.0, 100), .growth_interval = 1}, many},
      {"enabled=False", {.enabled = false}, "...."},
  };
  std::vector<std::string> lines;
  for (const Case& each : cases) lines.push_back(each.python + "|" + each.letters);
  const auto expected = ask_python("unit/grad_scaler_reference.py", lines);
  ASSERT_EQ(expected.size(), cases.size());
  for (size_t c = 0; c < cases.size(); ++c) {
    SCOPED_TRACE(cases[c].python);
    GradScaler scaler(cases[c].options);
    One one;
    ASSERT_EQ(expected[c].size(), 3 * cases[c].letters.size());
    for (size_t i = 0; i < cases[c].letters.size(); ++i) {
      const char letter = cases[c].letters[i];
      const bool stepped = one.iterate(scaler, letter == 'i' ? kInfinity : letter == 'n' ? NAN : 1);
      EXPECT_EQ(stepped, letter == '.');
      EXPECT_EQ(scaler.get_scale(), expected[c][3 * i]) << i;
      if (scaler.is_enabled()) {
        EXPECT_EQ(static_cast<double>(scaler.growth_tracker()), expected[c][3 * i + 1]) << i;
      }
      EXPECT_EQ(one.parameter.item<double>(), expected[c][3 * i + 2]) << i;
    }
  }
}

TEST(GradScaler, UnscaledGradientsSeveralOptimizersAndMisuse) {
  GradScaler scaler({.init_scale = 8});
  One one, other;
  expect_refusal({"no optimizer"}, [&] { scaler.update(); });
  scaler.scale((one.parameter * 3 + other.parameter * kInfinity).sum()).backward();
  scaler.unscale_(one.sgd);
  EXPECT_EQ(one.parameter.grad().item<double>(), 3);
  expect_refusal({"has been unscaled"}, [&] { scaler.unscale_(one.sgd); });
  EXPECT_TRUE(scaler.step(one.sgd));  // each optimizer by itself
  EXPECT_FALSE(scaler.step(other.sgd));
  expect_refusal({"twice"}, [&] { scaler.step(one.sgd); });
  expect_refusal({"has been unscaled"}, [&] { scaler.unscale_(other.sgd); });
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 4);
  scaler.update(32);
  EXPECT_EQ(scaler.get_scale(), 32);
  expect_refusal({"the new scale: expected a finite number above 0, got -1"}, [&] { scaler.update(-1); });

  const Tensor half = torch::ones({2}, torch::TensorOptions(torch::kHalf).requires_grad(true));
  torch::optim::SGD sgd({half}, 0.1);
  half.sum().backward();
  expect_refusal({"float16", "mixed_precision"}, [&] { scaler.unscale_(sgd); });

  nn::Embedding table(nn::EmbeddingOptions(5, 2).sparse(true));
  torch::optim::SGD of_table(table->parameters(), 0.1);
  scaler.scale(table(torch::tensor({1, 3, 1})).sum()).backward();
  scaler.unscale_(of_table);
  EXPECT_EQ(table->weight.grad().to_dense().sum().item<double>(), 6);

  for (const GradScalerOptions& wrong : {GradScalerOptions{.init_scale = 0},
                                         {.init_scale = kInfinity},
                                         {.growth_factor = 1},
                                         {.backoff_factor = 1},
                                         {.growth_interval = 0}})
    expect_refusal({"GradScaler: expected init_scale above 0"}, [&] { GradScaler{wrong}; });
}

// Each has a backward() of its own; their gradients add up. One infinity counts for all.
TEST(GradScaler, SeveralLossesOfOneOptimizer) {
  GradScaler scaler({.init_scale = 8});
  One one;
  const auto iterate = [&](double second) {
    one.sgd.zero_grad();
    const Tensor shared = one.parameter * 2;
    scaler.scale(shared.sum()).backward({}, /*retain_graph=*/true);
    scaler.scale((shared * second).sum()).backward();
    scaler.unscale_(one.sgd);
    const double gradient = one.parameter.grad().item<double>();
    const bool stepped = scaler.step(one.sgd);
    scaler.update();
    return std::pair(gradient, stepped);
  };
  EXPECT_EQ(iterate(5), std::pair(12.0, true));
  EXPECT_EQ(scaler.get_scale(), 8);
  EXPECT_EQ(iterate(kInfinity), std::pair(kInfinity, false));
  EXPECT_EQ(scaler.get_scale(), 4);
}

// With one copy per host, only one rank sees the infinity; with kFullShard, one on one host.
TEST(GradScaler, AllRanksDecideAlike) {
  on_hosts(kTwoEach, [](World& world) {
    for (const FsdpOptions& strategy : {FsdpOptions{}, full()}) {
      const auto net = make<FsdpNet>(7, {});
      auto model = fully_shard(net, strategy);
      torch::optim::SGD sgd(net->parameters(), 0.1);
      GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
      const auto iterate = [&](std::optional<double> spoil) {
        sgd.zero_grad();
        scaler.scale(model(fsdp_input(world.rank(), 0)).sum()).backward();
        if (spoil && model.owner(net->b->bias) == world.rank()) net->b->bias.mutable_grad().index_put_({3}, *spoil);
        scaler.unscale_(sgd);
        const double norm = model.clip_grad_norm_(1.0);
        EXPECT_EQ(std::isfinite(norm), !spoil);
        const bool stepped = scaler.step(sgd);
        scaler.update();
        return stepped;
      };
      for (const double spoil : {kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
        EXPECT_TRUE(iterate({}));
        EXPECT_FALSE(iterate(spoil));
        EXPECT_EQ(scaler.get_scale(), 512);
        EXPECT_TRUE(iterate({}));
        EXPECT_TRUE(iterate({}));
        EXPECT_EQ(scaler.get_scale(), 1024);
      }
      model.synchronize();
    }
  });
}

TEST(GradScaler, AnErrorOnOneRankIsOneOnAll) {
  on_ranks(2, [](World& world) {
    const Tensor parameter =
        torch::ones({2}, torch::TensorOptions(world.rank() == 1 ? torch::kHalf : torch::kFloat).requires_grad(true));
    torch::optim::SGD sgd({parameter}, 0.1);
    parameter.sum().backward();
    GradScaler scaler;
    expect_refusal({world.rank() == 1 ? "float16" : "another rank"}, [&] { scaler.step(sgd); });
  });
}

// In float16 small gradients would be zero.
TEST(GradScaler, MixedPrecisionInFloat16) {
  on_hosts(kTwoEach, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), exact = make<FsdpNet>(7, {});
    auto model = fully_shard(net, {.mixed_precision = {.param_dtype = torch::kHalf, .output_dtype = torch::kFloat}});
    DistributedDataParallel ddp(exact);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    const auto x = fsdp_input(world.rank(), 0);
    (ddp(x).sum() * 1e-6).backward();
    const auto error = [&] {
      double largest = 0;
      for (const auto& item : net->named_parameters()) {
        if (!item.value().grad().defined()) continue;
        const Tensor& expected = exact->named_parameters()[item.key()].grad();
        largest = std::max(largest, ((item.value().grad() - expected).norm() / expected.norm()).item<double>());
      }
      all_reduce(torch::from_blob(&largest, {1}, torch::kDouble), {.op = ReduceOp::MAX});
      return largest;
    };
    (model(x).sum() * 1e-6).backward();
    EXPECT_GT(error(), 0.1);
    sgd.zero_grad();
    GradScaler scaler({.init_scale = 1 << 20});
    scaler.scale(model(x).sum() * 1e-6).backward();
    scaler.unscale_(sgd);
    EXPECT_LT(error(), 0.05);
    EXPECT_TRUE(scaler.step(sgd));
    scaler.update();
    model.synchronize();
  });
}

// Module::parameters() has a parameter that modules share as often as it occurs.
TEST(GradScaler, ATiedParameterIsUnscaledOnce) {
  const Tensor weight = torch::ones({1}, torch::requires_grad());
  torch::optim::SGD sgd({weight, weight}, 0.1);
  GradScaler scaler({.init_scale = 8});
  scaler.scale((weight * 3).sum()).backward();
  scaler.unscale_(sgd);
  EXPECT_EQ(weight.grad().item<float>(), 3);
}

// What it counts towards is part of its state, as in Python.
TEST(GradScaler, TheIntervalIsPartOfItsState) {
  One one;
  GradScaler first({.init_scale = 16, .growth_interval = 4}), second({.init_scale = 1, .growth_interval = 2});
  for (int i = 0; i < 3; ++i) one.iterate(first, 1);
  std::stringstream bytes;
  {
    torch::serialize::OutputArchive archive;
    first.save(archive);
    archive.save_to(bytes);
  }
  torch::serialize::InputArchive archive;
  archive.load_from(bytes);
  second.load(archive);
  EXPECT_EQ(second.growth_tracker(), 3);
  one.iterate(second, 1);
  EXPECT_EQ(second.get_scale(), 32);
  EXPECT_EQ(second.growth_tracker(), 0);
}

TEST(GradScaler, GoesOnFromASnapshot) {
  const auto folder = std::filesystem::path(testing::TempDir()) / text("grad-scaler-", ::getpid());
  on_ranks(1, [&](World&) {
    for (const bool again : {false, true}) {
      GradScaler scaler({.init_scale = 16, .growth_interval = 5});
      Snapshot snapshot({.folder = folder, .default_generator = false});
      snapshot.add("scaler", scaler, {.per_rank = false});
      EXPECT_EQ(snapshot.restore(), again ? 1 : 0);
      if (again) {
        EXPECT_EQ(scaler.get_scale(), 8);
        EXPECT_EQ(scaler.growth_tracker(), 2);
        continue;
      }
      One one;
      for (const double factor : {1.0, kInfinity, 1.0, 1.0}) one.iterate(scaler, factor);
      snapshot.save(1);
    }
  });
  std::filesystem::remove_all(folder);
}

TEST(Autocast, ConvertsWhileItLives) {
  nn::Linear linear(4, 4);
  const Tensor x = torch::ones({2, 4});
  const auto dtype = [&] { return linear->forward(x).scalar_type(); };
  EXPECT_EQ(dtype(), torch::kFloat);
  {
    const Autocast outer;
    EXPECT_EQ(dtype(), torch::kBFloat16);
    EXPECT_EQ(torch::mse_loss(linear->forward(x), x).scalar_type(), torch::kFloat);
    {
      const Autocast inner(torch::kHalf);
      EXPECT_EQ(dtype(), torch::kHalf);
      const Autocast off(torch::kHalf, torch::kCPU, false);
      EXPECT_EQ(dtype(), torch::kFloat);
    }
    EXPECT_EQ(dtype(), torch::kBFloat16);
    // A new value after the outermost guard is seen: the copy of the old one is gone.
    linear->forward(x).sum().backward();
  }
  EXPECT_EQ(dtype(), torch::kFloat);
  EXPECT_EQ(linear->weight.grad().scalar_type(), torch::kFloat);
  {
    const torch::NoGradGuard no_grad;
    linear->weight.fill_(2);
    linear->bias.fill_(0);
    const Autocast again;
    EXPECT_EQ(linear->forward(x)[0][0].item<double>(), 8);
  }
  expect_refusal({"Autocast: expected BFloat16 or Half, got Double"}, [] { Autocast{torch::kDouble}; });
  expect_refusal({"no autocast for devices of type"}, [] { Autocast{torch::kHalf, torch::kMeta}; });
}

}  // namespace
}  // namespace muster::test
