// FullyShardedDataParallel: gradients of accumulation, of several forwards and backwards in a step, of gradients, of
// activation checkpoints and of unused parameters, where parameters are shared on one host and where they are gathered.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>

#include <functional>
#include <limits>
#include <string_view>

#include "multiprocess/fsdp_support.h"

namespace muster::test {
namespace {

// Gradients of all kinds of steps in which backward() reads parameters, compared with those of one process. They are
// equal to `rtol` of a value and `atol`.
struct Precision {
  torch::ScalarType dtype;
  double rtol, atol;
};
constexpr Precision kFloat32{torch::kFloat, 1e-4, 1e-5}, kFloat64{torch::kDouble, 1e-12, 1e-12};

void expect_gradients_of_every_kind_of_step(const HostOfRank& hosts, const FsdpOptions& options,
                                            const Precision& precision) {
  const auto ranks = static_cast<int>(hosts.size());
  on_hosts(hosts, [&](World& world) {
    const Prepare prepare = [&](nn::Module& net) { net.to(precision.dtype); };
    const auto net = make<FsdpNet>(7, prepare), alone = make<FsdpNet>(7, prepare);
    auto model = fully_shard(net, options);
    const auto expect_same_gradients = [&](const char* what) {
      SCOPED_TRACE(what);
      for (const auto& item : net->named_parameters()) {
        const Tensor &grad = item.value().grad(), &expected = alone->named_parameters()[item.key()].grad();
        ASSERT_EQ(grad.defined(), expected.defined() && model.owner(item.value()) == world.rank()) << item.key();
        if (grad.defined()) {
          EXPECT_TRUE(torch::allclose(grad, expected, precision.rtol, precision.atol)) << item.key();
        }
      }
      net->zero_grad();
      alone->zero_grad();
    };
    const auto x = [&](int rank, int step) { return fsdp_input(rank, step).to(precision.dtype).requires_grad_(); };
    const auto alone_for_all = [&](const std::function<Tensor(int rank)>& loss) {
      for (int r = 0; r < ranks; ++r) (loss(r) / ranks).backward();
    };
    {
      const auto guard = model.no_sync();
      model(x(world.rank(), 0)).sum().backward();
    }
    model(x(world.rank(), 1)).sum().backward();
    model(x(world.rank(), 2)).sum().backward();
    for (const int step : {0, 1, 2}) alone_for_all([&](int r) { return alone->forward(x(r, step)).sum(); });
    expect_same_gradients("accumulation");

    (model(x(world.rank(), 0)).sum() * model(x(world.rank(), 1)).square().sum()).backward();
    alone_for_all([&](int r) { return alone->forward(x(r, 0)).sum() * alone->forward(x(r, 1)).square().sum(); });
    expect_same_gradients("two forwards");

    const auto penalty = [&](const Tensor& y, const Tensor& of) {
      const Tensor gradient = torch::autograd::grad({y.square().sum()}, {of}, {}, true, true)[0];
      return gradient.square().sum() + y.sum();
    };
    Tensor input = x(world.rank(), 3);
    penalty(model(input), input).backward();
    alone_for_all([&](int r) {
      Tensor of = x(r, 3);
      return penalty(alone->forward(of), of);
    });
    expect_same_gradients("second derivatives");

    for (const char* const kept : {"nothing", "aten::addmm", "aten::relu"}) {
      const auto keep = [&](std::string_view operation) { return operation == kept; };
      const auto checkpointed = [&](FsdpNet& of, const Tensor& at) {
        const Tensor h = activation_checkpoint(
            {.preserve_rng_state = false, .keep = keep},
            [&](const Tensor& y) { return torch::relu(of.b(torch::relu(of.a(y)))); }, at);
        return of.d(torch::relu(of.c(h))).sum();
      };
      model(x(world.rank(), 4));
      checkpointed(*net, x(world.rank(), 4)).backward();
      alone_for_all([&](int r) { return checkpointed(*alone, x(r, 4)); });
      expect_same_gradients("activation checkpoints");
    }

    model(x(world.rank(), 5));
    net->a(x(world.rank(), 5)).sum().backward();
    alone_for_all([&](int r) { return alone->a(x(r, 5)).sum(); });
    expect_same_gradients("unused parameters");

    // What one backward() has gathered is gone when the next one begins.
    const Tensor loss = model(x(world.rank(), 6)).sum(), other = model(x(world.rank(), 7)).sum();
    loss.backward({}, /*retain_graph=*/true);
    other.backward();
    loss.backward();
    for (const int step : {6, 7, 6}) alone_for_all([&](int r) { return alone->forward(x(r, step)).sum(); });
    expect_same_gradients("several backwards");
  });
}

FsdpOptions may_be_unused(FsdpOptions options = {}) {
  options.find_unused_parameters = true;
  return options;
}

const HostOfRank kTogether{"a", "a"};

TEST(FsdpGradients, OfEveryKindOfStepOnOneHost) {
  for (const Precision& precision : {kFloat32, kFloat64}) {
    SCOPED_TRACE(torch::toString(precision.dtype));
    expect_gradients_of_every_kind_of_step(kTogether, may_be_unused(), precision);
  }
}
TEST(FsdpGradients, OfEveryKindOfStepGathered) {
  for (const Precision& precision : {kFloat32, kFloat64}) {
    SCOPED_TRACE(torch::toString(precision.dtype));
    expect_gradients_of_every_kind_of_step(kTwoEach, may_be_unused(full()), precision);
  }
}

// Weights of different sizes of a megabyte and more: no gradient can use another one's memory.
struct Widening : nn::Module {
  Widening() {
    for (int64_t width = 512; width < 512 + 8 * 16; width += 16) layers->push_back(nn::Linear(width, width + 16));
  }
  Tensor forward(const Tensor& x) { return layers->forward(x); }
  nn::Sequential layers = register_module("layers", nn::Sequential());
};

// Zeros that zero_grad() leaves are not kept beside the new gradients, and are there again if none come.
TEST(FsdpGradients, ZerosOfZeroGradTakeNoMemory) {
  for (const double divide_above_mb : {std::numeric_limits<double>::infinity(), 1.0}) {
    SCOPED_TRACE(divide_above_mb);
    on_hosts(kTogether, [&](World& world) {
      const auto net = make<Widening>(7, {}), alone = make<Widening>(7, {});
      auto model = fully_shard(net, may_be_unused({.divide_above_mb = divide_above_mb}));
      const auto parameters = model.parameters();
      const auto zero_grad = [&] {
        const torch::NoGradGuard no_grad;
        for (Tensor each : parameters)
          if (each.grad().defined()) each.mutable_grad().zero_();
      };
      const auto x = [](int rank, int step) { return drawn(rank, step, {4, 512}); };
      model(x(world.rank(), 0)).sum().backward();
      const size_t first = world.shared_heap()->used();
      for (int step = 1; step < 4; ++step) {
        zero_grad();
        model(x(world.rank(), step)).sum().backward();
        // A thread that has reduced a gradient may still hold it, so a block more may be in use; not one for each.
        EXPECT_LT(world.shared_heap()->used(), first + (size_t{2} << 20));
      }
      for (int r = 0; r < 2; ++r) (alone->forward(x(r, 3)).sum() / 2).backward();
      const auto expect_gradients = [&](const std::function<bool(size_t layer)>& any) {
        for (const Tensor& each : parameters) {  // whole ones, or rows
          ASSERT_EQ(each.grad().defined(), model.owner(each) == world.rank());
          if (!each.grad().defined()) continue;
          for (size_t layer = 0; layer < net->layers->size(); ++layer) {
            const auto of = [&](Widening& its) {
              return its.layers->ptr(layer)->parameters()[each.dim() == 2 ? 0 : 1];
            };
            const Tensor whole = of(*net);
            const int64_t at = each.const_data_ptr<float>() - whole.const_data_ptr<float>();
            if (at < 0 || at >= whole.numel()) continue;
            const Tensor expected =
                any(layer) ? of(*alone).grad().narrow(0, at / whole.stride(0), each.size(0)) : torch::zeros_like(each);
            EXPECT_TRUE(torch::allclose(each.grad(), expected, 1e-4, 1e-5)) << layer;
          }
        }
      };
      expect_gradients([](size_t) { return true; });

      zero_grad();
      model(x(world.rank(), 4));
      alone->zero_grad();
      net->layers[0]->as<nn::Linear>()->forward(x(world.rank(), 4)).sum().backward();
      for (int r = 0; r < 2; ++r) (alone->layers[0]->as<nn::Linear>()->forward(x(r, 4)).sum() / 2).backward();
      expect_gradients([](size_t layer) { return layer == 0; });
    });
  }
}

// An average is on its owner, which has no graph of what the others have added to it. So backward() with create_graph
// is refused before it has changed a gradient, and a backward() without it goes on as if nothing had happened.
TEST(FsdpGradients, BackwardWithCreateGraphIsRefused) {
  for (const bool gathers : {false, true}) {
    SCOPED_TRACE(gathers);
    on_hosts(gathers ? kApart : kTogether, [&](World& world) {
      const Prepare in_doubles = [](nn::Module& net) { net.to(torch::kDouble); };
      const auto net = make<FsdpNet>(7, in_doubles), alone = make<FsdpNet>(7, in_doubles);
      auto model = fully_shard(net, gathers ? full() : FsdpOptions{});
      const auto x = [](int rank, int step) { return fsdp_input(rank, step).to(torch::kDouble); };
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        alone->zero_grad();
        const Tensor loss = model(x(world.rank(), step)).square().sum();
        const auto with_graph = [&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); };
        const auto refuse = [&] {
          expect_refusal({"create_graph does not go through FullyShardedDataParallel", "autograd::grad()"}, with_graph);
          for (const auto& item : net->named_parameters()) EXPECT_FALSE(item.value().grad().defined()) << item.key();
        };
        refuse();
        {
          const auto guard = model.no_sync();
          refuse();
        }
        loss.backward();
        for (int r = 0; r < 2; ++r) (alone->forward(x(r, step)).square().sum() / 2).backward();
        for (const auto& item : net->named_parameters()) {
          const Tensor& grad = item.value().grad();
          ASSERT_EQ(grad.defined(), model.owner(item.value()) == world.rank()) << item.key();
          if (!grad.defined()) continue;
          EXPECT_TRUE(torch::allclose(grad, alone->named_parameters()[item.key()].grad(), 1e-12, 1e-12)) << item.key();
        }
      }
    });
  }
}

}  // namespace
}  // namespace muster::test
