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
#include "multiprocess/fsdp_support.h"
#include "shm/mapping.h"

namespace muster::test {
namespace {

const MixedPrecision kBFloat16{.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat};

FsdpOptions with(MixedPrecision precision, FsdpOptions options = {}) {
  options.mixed_precision = std::move(precision);
  return options;
}

// The steps of one process that has parameters, and in each step a copy of the module in fewer bits, which computes the
// gradients of every rank's part.
template <typename Net>
std::shared_ptr<Net> trained_alone(const MixedPrecision& precision, int ranks, int steps, auto loss_of) {
  const auto net = make<Net>(7, {}), copy = make<Net>(7, {});
  for (auto& module : copy->modules())
    if (!precision.full_precision || !precision.full_precision(*module))
      for (auto& parameter : module->parameters(false)) parameter.set_data(parameter.to(*precision.param_dtype));
  torch::optim::AdamW optimizer(net->parameters());
  for (int step = 0; step < steps; ++step) {
    const torch::NoGradGuard no_grad;
    const auto here = net->parameters(), low = copy->parameters();
    for (size_t i = 0; i < here.size(); ++i) {
      low[i].copy_(here[i]);
      here[i].mutable_grad() = torch::zeros_like(here[i]);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      copy->zero_grad();
      {
        const at::AutoGradMode with_grad(true);
        loss_of(*copy, rank, step, *precision.param_dtype).backward();
      }
      for (size_t i = 0; i < here.size(); ++i)
        here[i].mutable_grad() += low[i].grad().to(here[i].scalar_type()) / ranks;
    }
    optimizer.step();
  }
  return net;
}

bool is_group_norm(const nn::Module& module) { return dynamic_cast<const nn::GroupNormImpl*>(&module); }
bool is_norm(const nn::Module& module) {
  return is_group_norm(module) || dynamic_cast<const nn::BatchNorm2dImpl*>(&module) ||
         dynamic_cast<const nn::InstanceNorm2dImpl*>(&module);
}

template <typename Net>
void expect_steps_of_such_a_copy(const HostOfRank& hosts, const FsdpOptions& options, auto loss_of, double apart = 0) {
  SCOPED_TRACE(testing::PrintToString(hosts));
  MixedPrecision of_alone = options.mixed_precision;
  of_alone.full_precision = is_norm;
  const auto alone = trained_alone<Net>(of_alone, static_cast<int>(hosts.size()), 3, loss_of);
  on_hosts(hosts, [&](World& world) {
    const auto net = make<Net>(7 + static_cast<uint64_t>(world.rank()), {});
    auto model = fully_shard(net, options);
    torch::optim::AdamW optimizer(net->parameters());
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      loss_of(model, world.rank(), step, torch::kFloat).backward();
      for (const auto& parameter : model.owned_parameters()) {
        EXPECT_EQ(parameter.scalar_type(), torch::kFloat);
        EXPECT_EQ(parameter.grad().scalar_type(), torch::kFloat);
      }
      optimizer.step();
    }
    model.gather();
    const auto first = make<Net>(7, {})->named_parameters(), expected = alone->named_parameters();
    for (const auto& item : net->named_parameters()) {
      const Tensor moved = item.value() - first[item.key()], should = expected[item.key()] - first[item.key()];
      EXPECT_LE((moved - should).norm().template item<double>(), (apart + 1e-4) * should.norm().template item<double>())
          << item.key();
    }
    model.synchronize();
  });
}

const auto kLossOfFsdpNet = [](auto& net, int rank, int step, at::ScalarType dtype) {
  return net.forward(fsdp_input(rank, step).to(dtype)).to(torch::kFloat).square().sum();
};

TEST(FsdpMixed, StepsAreThoseOfACopyInFewerBits) {
  for (const HostOfRank& hosts : {HostOfRank{"a"}, HostOfRank{"a", "a"}, kTwoEach})
    for (const FsdpOptions& options : {FsdpOptions{}, full(), full({.unit_cap_mb = 1e-6, .max_gathered_units = 2})})
      expect_steps_of_such_a_copy<FsdpNet>(hosts, with(kBFloat16, options), kLossOfFsdpNet);
}

struct SmallLstm : nn::Module {
  Tensor forward(const Tensor& x) { return last(std::get<0>(lstm(x))); }
  nn::LSTM lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(16, 128).num_layers(2)));
  nn::Linear last = register_module("last", nn::Linear(128, 8));
};
struct SmallConvolutions : nn::Module {
  Tensor forward(const Tensor& x) { return last(norm(instance(torch::relu(norm_first(first(x))))).mean({2, 3})); }
  nn::Conv2d first = register_module("first", nn::Conv2d(nn::Conv2dOptions(3, 32, 3)));
  nn::BatchNorm2d norm_first = register_module("norm_first", nn::BatchNorm2d(32));
  nn::InstanceNorm2d instance = register_module(
      "instance", nn::InstanceNorm2d(nn::InstanceNorm2dOptions(32).affine(true).track_running_stats(true)));
  nn::GroupNorm norm = register_module("norm", nn::GroupNorm(4, 32));
  nn::Linear last = register_module("last", nn::Linear(32, 8));
};

TEST(FsdpMixed, Models) {
  for (const FsdpOptions& options : {FsdpOptions{}, full({.unit_cap_mb = 0.1})}) {
    // A table that is also the last layer's weight: its two gradients are added in float32 here.
    expect_steps_of_such_a_copy<Transformer>(
        kApart, with(kBFloat16, options),
        [](auto& net, int rank, int step, at::ScalarType) { return net.forward(rank, step).to(torch::kFloat); }, 0.05);
    expect_steps_of_such_a_copy<SmallLstm>(kApart, with(kBFloat16, options),
                                           [](auto& net, int rank, int step, at::ScalarType dtype) {
                                             const Tensor x = drawn(rank, step, {5, 3, 16}).to(dtype);
                                             return net.forward(x).to(torch::kFloat).square().sum();
                                           });
    MixedPrecision precision = kBFloat16;
    precision.full_precision = is_group_norm;
    expect_steps_of_such_a_copy<SmallConvolutions>(kApart, with(precision, options),
                                                   [](auto& net, int rank, int step, at::ScalarType dtype) {
                                                     const Tensor x = drawn(rank, step, {4, 3, 9, 9}).to(dtype);
                                                     return net.forward(x).to(torch::kFloat).square().sum();
                                                   });
  }
}

// What forward() sees.
struct Watching : nn::Module {
  std::tuple<Tensor, std::vector<Tensor>> forward(const Tensor& x, std::optional<Tensor> y, const Tensor& n) {
    seen = {x.scalar_type(),
            y->scalar_type(),
            n.scalar_type(),
            (a->weight + 0).scalar_type(),
            a->weight.t().scalar_type(),
            kept->weight.t().scalar_type(),
            table.scalar_type()};
    return {a(x) + *y, {n, kept->bias + 0}};
  }
  nn::Linear a = register_module("a", nn::Linear(4, 4)), kept = register_module("kept", nn::Linear(4, 5));
  Tensor table = register_buffer("table", torch::ones({3}));
  std::vector<at::ScalarType> seen;
};

TEST(FsdpMixed, DtypesOfArgumentsParametersBuffersAndResults) {
  using enum at::ScalarType;
  on_hosts(kApart, [](World&) {
    for (const FsdpOptions& strategy : {FsdpOptions{}, full()}) {
      MixedPrecision precision{
          .param_dtype = BFloat16, .buffer_dtype = Half, .full_precision = [](const nn::Module& module) {
            const auto* const linear = dynamic_cast<const nn::LinearImpl*>(&module);
            return linear && linear->options.out_features() == 5;
          }};
      const auto seen_with = [&] {
        auto model = fully_shard(std::make_shared<Watching>(), with(precision, strategy));
        const auto [first, second] = model(torch::ones({2, 4}), torch::ones({4}), torch::ones({2}, torch::kLong));
        auto seen = model.module()->seen;
        for (const Tensor& each : {first, second[0], second[1]}) seen.push_back(each.scalar_type());
        model.synchronize();
        return seen;
      };
      using Types = std::vector<at::ScalarType>;
      EXPECT_EQ(seen_with(), (Types{BFloat16, BFloat16, Long, BFloat16, BFloat16, Float, Half, BFloat16, Long, Float}));
      precision.output_dtype = Double;
      precision.cast_forward_inputs = false;
      precision.param_dtype = {};
      EXPECT_EQ(seen_with(), (Types{Float, Float, Long, Float, Float, Float, Half, Double, Long, Double}));
    }
  });
}

TEST(FsdpMixed, EvaluationOutsideOfForwardHasTheParametersThemselves) {
  on_hosts(kTwoEach, [](World& world) {
    for (const FsdpOptions& strategy : {FsdpOptions{}, full()}) {
      const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {}), low = make<FsdpNet>(7, {});
      low->to(torch::kBFloat16);
      auto model = fully_shard(net, with(kBFloat16, strategy));
      const Tensor x = fsdp_input(world.rank(), 0);
      const Tensor expected = low->forward(x.to(torch::kBFloat16)).to(torch::kFloat);
      EXPECT_TRUE(torch::equal(model(x), expected));
      EXPECT_EQ((net->a->weight + 0).scalar_type(), torch::kBFloat16);
      model.gather();
      EXPECT_TRUE(torch::equal(net->forward(x), other->forward(x)));
      net->eval();
      for (int step = 0; step <= world.rank(); ++step) EXPECT_TRUE(torch::equal(model(x), expected));
      model.synchronize();
      net->train();

      // New values while all are here.
      model.gather();
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : model.owned_parameters()) parameter.mul_(2);
        for (auto& parameter : low->parameters()) parameter.mul_(2);
      }
      EXPECT_TRUE(torch::equal(model(x), low->forward(x.to(torch::kBFloat16)).to(torch::kFloat)));
      model.synchronize();
      // Others by torch::load() or the like.
      if (strategy.strategy == ShardingStrategy::kFullShard) model.gather();
      for (auto& parameter : net->parameters()) parameter.set_data(torch::full_like(parameter, 0.01));
      const torch::NoGradGuard no_grad;
      for (auto& parameter : low->parameters()) parameter.fill_(0.01);
      EXPECT_TRUE(torch::equal(model(x), low->forward(x.to(torch::kBFloat16)).to(torch::kFloat)));
      model.synchronize();
    }
  });
}

// Without corners, at which a rounding error would change a derivative.
struct Smooth : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(12, 100)), b = register_module("b", nn::Linear(100, 100)),
             c = register_module("c", nn::Linear(100, 5));
  Tensor forward(const Tensor& x) { return c(torch::tanh(b(torch::tanh(a(x))))); }
};

// In float64 with copies in float32, what is computed can be compared with float64.
TEST(FsdpMixed, EveryKindOfStep) {
  on_hosts(kTwoEach, [](World& world) {
    for (const FsdpOptions& strategy : {FsdpOptions{}, full()}) {
      const auto net = make<Smooth>(7, {}), alone = make<Smooth>(7, {});
      net->to(torch::kDouble);
      alone->to(torch::kDouble);
      auto model = fully_shard(net, with({.param_dtype = torch::kFloat, .output_dtype = torch::kDouble}, strategy));
      const auto expect_same_gradients = [&](const char* what) {
        SCOPED_TRACE(what);
        for (const auto& item : net->named_parameters()) {
          if (model.owner(item.value()) != world.rank()) continue;
          const Tensor &grad = item.value().grad(), &expected = alone->named_parameters()[item.key()].grad();
          EXPECT_EQ(grad.scalar_type(), torch::kDouble);
          EXPECT_LE((grad - expected).norm().item<double>(), 1e-4 * expected.norm().item<double>()) << item.key();
        }
        net->zero_grad();
        alone->zero_grad();
      };
      const auto x = [&](int rank, int step) { return fsdp_input(rank, step).to(torch::kDouble).requires_grad_(); };
      const auto alone_for_all = [&](const std::function<Tensor(int rank)>& loss) {
        for (int r = 0; r < 4; ++r) (loss(r) / 4).backward();
      };
      {
        const auto guard = model.no_sync();
        model(x(world.rank(), 0)).sum().backward();
      }
      model(x(world.rank(), 1)).square().sum().backward();
      alone_for_all([&](int r) { return alone->forward(x(r, 0)).sum() + alone->forward(x(r, 1)).square().sum(); });
      expect_same_gradients("accumulation");

      const auto penalty = [&](const Tensor& y, const Tensor& of) {
        const Tensor gradient = torch::autograd::grad({y.square().sum()}, {of}, {}, true, true)[0];
        return gradient.square().sum() + y.sum();
      };
      const Tensor input = x(world.rank(), 3);
      penalty(model(input), input).backward();
      alone_for_all([&](int r) {
        const Tensor of = x(r, 3);
        return penalty(alone->forward(of), of);
      });
      expect_same_gradients("second derivatives");

      const auto checkpointed = [&](Smooth& of, const Tensor& at) {
        const Tensor h = activation_checkpoint(
            kNoRandomNumbers, [&](const Tensor& y) { return torch::tanh(of.b(torch::tanh(of.a(y)))); }, at);
        return of.c(h).sum();
      };
      model(x(world.rank(), 4));
      checkpointed(*net, x(world.rank(), 4).to(torch::kFloat)).backward();
      alone_for_all([&](int r) { return checkpointed(*alone, x(r, 4)); });
      expect_same_gradients("activation checkpoints");
    }
  });
}

TEST(FsdpMixed, AnOldGraphDoesNotUseNewValues) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net, with(kBFloat16));
    torch::optim::AdamW optimizer(net->parameters());
    const Tensor loss = model(fsdp_input(world.rank(), 0)).sum();
    loss.backward({}, /*retain_graph=*/true);
    optimizer.step();
    model(fsdp_input(world.rank(), 0)).sum().backward();
    EXPECT_CONTAINS(message_of<c10::Error>([&] { loss.backward(); }), "modified by an inplace operation");
    model.synchronize();
  });
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
    expect_refusal({"mixed_precision.param_dtype is Long", "kBFloat16"},
                   [] { fully_shard(make<FsdpNet>(7, {}), with({.param_dtype = torch::kLong})); });
    const bool first = world.rank() == 0;
    const auto expect_mismatch = [](const MixedPrecision& mine) {
      EXPECT_CONTAINS(message_of<Mismatch>([&] { fully_shard(make<FsdpNet>(7, {}), with(mine)); }), "differs");
    };
    expect_mismatch({.param_dtype = first ? torch::kBFloat16 : torch::kHalf});
    expect_mismatch({.param_dtype = torch::kHalf, .cast_forward_inputs = first});
    expect_mismatch({.output_dtype = first ? torch::kHalf : torch::kFloat});
  });
}

}  // namespace
}  // namespace muster::test
