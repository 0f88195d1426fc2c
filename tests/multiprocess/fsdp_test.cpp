// FullyShardedDataParallel on ranks that are threads: parameters, owners, gradients, memory.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cmath>
#include <limits>
#include <map>
#include <stdexcept>

#include "multiprocess/fsdp_support.h"
#include "parallel/fsdp/owners.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/modules/balance.h"

namespace muster::test {
namespace {

TEST(Fsdp, ParametersExistOnceAndEachHasOneOwner) {
  for (const int n : {1, 2, 3, 4}) {
    SCOPED_TRACE(n);
    on_ranks(n, [n](World& world) {
      const auto net = make<FsdpNet>(7 + static_cast<uint64_t>(world.rank()), {});
      const auto first = make<FsdpNet>(7, {});  // what rank 0 has
      const auto before = net->parameters();
      torch::optim::AdamW optimizer(net->parameters());  // before or after: the tensors stay the same
      auto model = fully_shard(net);
      const auto parameters = net->parameters();
      size_t all = 0, mine = 0;
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(parameters[i].is_same(before[i]));
        EXPECT_TRUE(torch::equal(parameters[i], first->parameters()[i]));
        EXPECT_TRUE(parallel::is_shared(parameters[i]));
        EXPECT_EQ(parallel::belongs_to_another_rank(parameters[i]), model.owner(parameters[i]) != world.rank());
        all += parameters[i].nbytes();
        if (model.owner(parameters[i]) == world.rank()) mine += parameters[i].nbytes();
      }
      EXPECT_LE(mine, all / static_cast<size_t>(n) + parameters[2].nbytes());  // the largest one may be too much
      barrier();

      // What an owner writes, all read.
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : model.owned_parameters()) parameter.fill_(world.rank() + 1);
      }
      model.synchronize();
      for (const auto& parameter : parameters) EXPECT_TRUE(parameter.eq(model.owner(parameter) + 1).all().item<bool>());
      model(fsdp_input(world.rank(), 0)).sum().backward();
      for (const auto& parameter : parameters)
        EXPECT_EQ(parameter.grad().defined(), model.owner(parameter) == world.rank());
      optimizer.step();
      EXPECT_EQ(optimizer.state().size(), model.owned_parameters().size());
      EXPECT_THROW(model.owner(torch::ones({2})), InvalidArgument);
    });
  }
}

TEST(Fsdp, OwnersAreBalanced) {
  std::vector<parallel::NamedTensor> parameters;
  const auto add = [&](int64_t numel, bool trained = true) {
    parameters.push_back({"p", torch::empty({numel}, torch::requires_grad(trained))});
  };
  for (int layer = 0; layer < 12; ++layer) {
    for (const int64_t large : {1 << 20, 1 << 20, 1 << 18, 1 << 19}) add(large);
    for (int small = 0; small < 6; ++small) add(600 * (small + 1));
    add(1 << 19, false);
  }
  for (const int ranks : {1, 2, 3, 4, 7}) {
    const auto owners = parallel::Balance(ranks).divide(parameters, 25 << 20);
    std::map<bool, std::vector<double>> load{{true, std::vector<double>(static_cast<size_t>(ranks))},
                                             {false, std::vector<double>(static_cast<size_t>(ranks))}};
    for (size_t i = 0; i < owners.size(); ++i)
      load[parameters[i].tensor.requires_grad()][static_cast<size_t>(owners[i])] +=
          static_cast<double>(parameters[i].tensor.nbytes());
    const auto [least, most] = std::minmax_element(load[true].begin(), load[true].end());
    EXPECT_LE(*most, 1.15 * *least) << ranks;
    const auto [least_frozen, most_frozen] = std::minmax_element(load[false].begin(), load[false].end());
    EXPECT_LE(*most_frozen, *least_frozen + (1 << 21)) << ranks;
  }
  // Fewer parameters than ranks, empty ones, none.
  EXPECT_EQ(parallel::Balance(4).divide({{"p", torch::empty({3})}, {"q", torch::empty({0})}}, 25 << 20).size(), 2u);
  EXPECT_TRUE(parallel::Balance(4).divide({}, 25 << 20).empty());
}

// In place of zero_grad(): averages of several backward() calls, with and without no_sync(), add up as in one process.
TEST(Fsdp, GradientsAccumulate) {
  for (const int n : {1, 2, 3}) {
    SCOPED_TRACE(n);
    on_ranks(n, [n](World& world) {
      const auto net = make<FsdpNet>(7, {}), alone = make<FsdpNet>(7, {});
      auto model = fully_shard(net);
      for (int round = 0; round < 3; ++round) {
        SCOPED_TRACE(round);
        net->zero_grad(/*set_to_none=*/round != 1);
        alone->zero_grad();
        const auto backward = [&](int step) {
          model(fsdp_input(world.rank(), step)).sum().backward();
          for (int r = 0; r < n; ++r) (alone->forward(fsdp_input(r, step)).sum() / n).backward();
        };
        if (round != 1) {  // zeros count as an average
          using NoSync = decltype(model)::NoSync;
          const std::unique_ptr<NoSync> guard(round == 0 ? new NoSync(model.no_sync()) : nullptr);
          if (!guard) model.set_requires_gradient_sync(false);
          {
            const torch::NoGradGuard no_grad;
            model(fsdp_input(world.rank(), 0));  // the first one after the last round
          }
          const auto operations = world.group().stats().operations;
          backward(0);
          EXPECT_EQ(world.group().stats().operations, operations) << "no_sync() communicated";
          for (const auto& parameter : net->parameters()) EXPECT_TRUE(parameter.grad().defined());
          if (!guard) model.set_requires_gradient_sync(true);
        }
        backward(1);
        backward(2);
        backward(3);
        for (const auto& item : net->named_parameters()) {
          if (model.owner(item.value()) != world.rank()) {
            EXPECT_FALSE(item.value().grad().defined()) << item.key();
            continue;
          }
          Tensor expected = alone->named_parameters()[item.key()].grad();
          EXPECT_TRUE(torch::allclose(item.value().grad(), expected, 1e-4, 1e-5)) << item.key();
        }
        if (round != 1) {
          const auto guard = model.no_sync();
          const auto loss = model(fsdp_input(world.rank(), 4)).sum();
          expect_refusal({"in no_sync() would add to the gradient of", "zero_grad()"}, [&] { loss.backward(); });
        }
      }
    });
  }
}

// A gradient that the user puts into .grad before backward() is the rank's own, in each step.
TEST(Fsdp, GradientsThatTheUserSetsAreAveragedToo) {
  for (const HostOfRank& hosts : {HostOfRank{"a", "a", "a"}, HostOfRank{"a", "a", "b"}})
    on_hosts(hosts, [](World& world) {
      const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
      auto model = fully_shard(net);
      DistributedDataParallel ddp(other);
      for (int step = 0; step < 3; ++step) {
        for (const auto& each : {net, other}) {
          each->zero_grad();
          for (auto& parameter : each->parameters()) parameter.mutable_grad() = 0.1 * parameter.detach();
        }
        model(fsdp_input(world.rank(), step)).square().sum().backward();
        ddp(fsdp_input(world.rank(), step)).square().sum().backward();
        for (const auto& item : net->named_parameters())
          if (const Tensor& grad = item.value().grad(); grad.defined()) {
            EXPECT_TRUE(torch::allclose(grad, other->named_parameters()[item.key()].grad(), 1e-4, 1e-7))
                << item.key() << " in step " << step;
          }
      }
    });
}

// A parameter has another accumulator after a conversion to another dtype and back.
TEST(Fsdp, GradientsAccumulateAfterAConversionOfTheModule) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), alone = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    model(fsdp_input(world.rank(), 0)).sum().backward();
    net->zero_grad();
    model.synchronize();
    for (const auto& each : {net, alone})
      for (const auto dtype : {torch::kHalf, torch::kFloat}) each->to(dtype);
    model.synchronize();
    for (const int step : {1, 2}) {
      model(fsdp_input(world.rank(), step)).sum().backward();
      for (int r = 0; r < 2; ++r) (alone->forward(fsdp_input(r, step)).sum() / 2).backward();
    }
    for (const auto& item : net->named_parameters())
      if (const Tensor& grad = item.value().grad(); grad.defined()) {
        EXPECT_TRUE(torch::allclose(grad, alone->named_parameters()[item.key()].grad(), 1e-4, 1e-5)) << item.key();
      }
    const auto guard = model.no_sync();
    const auto loss = model(fsdp_input(world.rank(), 3)).sum();
    expect_refusal({"in no_sync() would add to the gradient of"}, [&] { loss.backward(); });
  });
}

// Also never: on one host, on several that have all, and with copies in fewer bits.
TEST(Fsdp, AfterGatherEachRankEvaluatesAsOftenAsItLikes) {
  for (const HostOfRank& hosts : {HostOfRank{"a", "a"}, kTwoEach})
    for (const MixedPrecision& precision : {MixedPrecision{}, MixedPrecision{.param_dtype = torch::kBFloat16}})
      on_hosts(hosts, [&](World& world) {
        const auto net = make<FsdpNet>(7, {});
        auto model = fully_shard(net, {.mixed_precision = precision});
        torch::optim::SGD optimizer(net->parameters(), 1e-3);
        for (int round = 0; round < 2; ++round) {
          model(fsdp_input(world.rank(), round)).square().sum().backward();
          optimizer.step();
          model.gather();
          net->eval();
          const Tensor whole = model(fsdp_input(0, 9)).detach();
          for (int step = 0; step < world.rank(); ++step) model(fsdp_input(0, step));
          model.synchronize();
          if (world.rank() == 0) {  // the others do nothing
            model.gather();
          } else {
            model.gather();
            EXPECT_TRUE(torch::equal(model(fsdp_input(0, 9)), whole));
          }
          model.synchronize();
          net->train();
          Tensor of_all = whole.clone();
          all_reduce(of_all);
          EXPECT_TRUE(torch::allclose(of_all / world.world_size(), whole, 1e-3, 1e-3));
          optimizer.zero_grad();
        }
      });
}

TEST(Fsdp, ClipsByTheNormOfAllGradients) {
  on_ranks(3, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    DistributedDataParallel ddp(other);
    for (const double type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()})
      for (const double limit : {1e-2, 1e6}) {
        net->zero_grad();
        other->zero_grad();
        model(fsdp_input(world.rank(), 1)).square().sum().backward();
        ddp(fsdp_input(world.rank(), 1)).square().sum().backward();
        const double norm = model.clip_grad_norm_(limit, type);
        EXPECT_NEAR(norm, nn::utils::clip_grad_norm_(other->parameters(), limit, type), 1e-5 * norm);
        for (const auto& item : net->named_parameters())
          if (const Tensor& grad = item.value().grad(); grad.defined()) {
            EXPECT_TRUE(torch::allclose(grad, other->named_parameters()[item.key()].grad(), 1e-5, 1e-9));
          }
      }
    // One rank's gradient is not finite: all ranks know.
    for (const double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
      for (const double type : {2.0, std::numeric_limits<double>::infinity()}) {
        if (world.rank() == 1) model.owned_parameters()[0].mutable_grad().view(-1)[0] = bad;
        const auto operations = world.group().stats().operations;
        EXPECT_THROW(model.clip_grad_norm_(1, type, true), InvalidArgument) << bad << ' ' << type;
        EXPECT_EQ(world.group().stats().operations, operations + 1);
      }
    EXPECT_FALSE(std::isfinite(model.clip_grad_norm_(1)));
    for (const auto& parameter : model.owned_parameters()) EXPECT_TRUE(parameter.grad().isnan().any().item<bool>());
    EXPECT_THROW(model.clip_grad_norm_(1, 0), InvalidArgument);
    net->zero_grad();
    {
      const auto guard = model.no_sync();
      model(fsdp_input(world.rank(), 2)).sum().backward();
    }
    expect_refusal({"clip_grad_norm_(): the gradient of ", " is this rank's own, of a no_sync()"},
                   [&] { model.clip_grad_norm_(1); });
  });
}

TEST(Fsdp, UnusedParametersAreNamedOnEveryRank) {
  on_ranks(2, [](World& world) {
    struct Branches : nn::Module {
      nn::Linear left = register_module("left", nn::Linear(12, 1)), right = register_module("right", nn::Linear(12, 1)),
                 nobody = register_module("nobody", nn::Linear(12, 1));
      Tensor forward(const Tensor& x, bool use_right) { return use_right ? right(x) : left(x); }
    };
    const auto net = make<Branches>(3, {});
    {
      auto model = fully_shard(net);
      const auto loss = model(fsdp_input(world.rank(), 0), world.rank() == 1).sum();
      expect_refusal({"on all ranks: nobody.", "on some ranks: ", "left.weight", "right.weight"},
                     [&] { loss.backward(); });
    }
    auto allowing = fully_shard(net, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      allowing(fsdp_input(world.rank(), step), world.rank() == 1).sum().backward();
      const auto expect = [&](const Tensor& parameter, const Tensor& expected) {
        if (allowing.owner(parameter) == world.rank()) {
          EXPECT_TRUE(torch::allclose(parameter.grad(), expected, 1e-5, 1e-6));
        } else {
          EXPECT_FALSE(parameter.grad().defined());
        }
      };
      EXPECT_FALSE(net->nobody->weight.grad().defined());
      expect(net->left->weight, fsdp_input(0, step).sum(0, true) / 2);
      expect(net->right->weight, fsdp_input(1, step).sum(0, true) / 2);
    }
  });
}

TEST(Fsdp, ABackwardThatThrewIsMadeUpFor) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), alone = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    bool fails = false;
    net->b->weight.register_hook([&](const Tensor&) {
      if (fails) throw std::runtime_error("in a hook");
    });
    for (int step = 0; step < 4; ++step) {
      SCOPED_TRACE(step);
      const auto loss = model(fsdp_input(world.rank(), 10 + step)).sum(),
                 next = model(fsdp_input(world.rank(), step)).sum();
      fails = world.rank() == 0;
      EXPECT_THROW(loss.backward(), std::exception);  // on the other rank, because not all gradients are there
      fails = false;
      net->zero_grad();
      alone->zero_grad();
      if (step % 2 == 0)
        next.backward();
      else
        model(fsdp_input(world.rank(), step)).sum().backward();
      for (int r = 0; r < 2; ++r) (alone->forward(fsdp_input(r, step)).sum() / 2).backward();
      for (const auto& item : net->named_parameters()) {
        const Tensor& grad = item.value().grad();
        EXPECT_EQ(grad.defined(), model.owner(item.value()) == world.rank()) << item.key();
        if (!grad.defined()) continue;
        EXPECT_TRUE(torch::allclose(grad, alone->named_parameters()[item.key()].grad(), 1e-4, 1e-5)) << item.key();
      }
      net->zero_grad();
    }
  });
}

// --- memory ---

// Gradients of other ranks are freed while backward goes on: no rank ever needs blocks for all.
TEST(Fsdp, ARankNeedsLittleMemoryForGradientsOfOthers) {
  struct Deep : nn::Module {
    Deep() {
      for (int i = 0; i < 24; ++i) layers->push_back(nn::Linear(nn::LinearOptions(512, 512).bias(false)));
      register_module("layers", layers);
    }
    Tensor forward(Tensor x) { return layers->forward(x); }
    nn::Sequential layers;
  };
  constexpr size_t kLayer = 512 * 512 * 4;
  on_ranks(3, [](World& world) {
    const auto net = make<Deep>(7, {});
    auto model = fully_shard(net);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const Tensor x = drawn(world.rank(), step, {4, 512}).set_requires_grad(true);
      Tensor y = x;
      // In each layer's backward all ranks have reduced the gradients of the layers behind it, up to the last few.
      for (size_t i = 0; i < net->layers->size(); ++i) {
        y = net->layers[i]->as<nn::Linear>()->forward(y);
        y.register_hook([&](const Tensor&) -> void { barrier(); });
      }
      model.synchronize();
      y.sum().backward();
      EXPECT_LE(world.heap().used(), (24 / 3 + 8) * (kLayer + kLayer / 16)) << "step " << step;
      model.synchronize();
    }
  });
}

// --- errors of backward() ---

TEST(Fsdp, ASecondGradientInOneBackwardIsRefused) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    FullyShardedDataParallel<FsdpNet> model(net, {.bucket_cap_mb = 1e-3, .first_bucket_cap_mb = 1e-3});
    const Tensor x = fsdp_input(world.rank(), 0).set_requires_grad(true);
    const Tensor y = x * 1;
    y.register_hook([&](const Tensor&) -> void {  // when those of all layers have come
      const torch::AutoGradMode with_grad(true);
      net->d->weight.sum().backward();
    });
    const Tensor loss = model(y).sum();
    expect_refusal({"parameter d.weight got a second gradient in one backward()"}, [&] { loss.backward(); });
    net->zero_grad();
    model(fsdp_input(world.rank(), 1)).sum().backward();
  });
}

TEST(Fsdp, CollectivesOfTheModelMakeUpForABackwardThatThrew) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net, {.find_unused_parameters = true});
    bool fails = false;
    net->b->weight.register_hook([&](const Tensor&) {
      if (fails) throw std::runtime_error("in a hook");
    });
    for (const bool clips : {false, true}) {
      const auto loss = model(fsdp_input(world.rank(), 0)).sum();
      fails = world.rank() == 0;
      if (fails)
        EXPECT_THROW(loss.backward(), std::exception);
      else
        loss.backward();
      fails = false;
      if (clips)
        EXPECT_GT(model.clip_grad_norm_(1), 0);
      else
        model.synchronize();
      net->zero_grad();
    }
  });
}

}  // namespace
}  // namespace muster::test
