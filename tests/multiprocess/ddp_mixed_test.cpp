// DistributedDataParallel in mixed precision.
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "base/text.h"
#include "multiprocess/mixed_support.h"
#include "support/resnet18.h"

namespace muster::test {
namespace {

template <typename Net>
using Ddp = DistributedDataParallel<Net>;

const auto kWrap = []<typename Net>(std::shared_ptr<Net> net, MixedPrecision precision) {
  return Ddp<Net>(std::move(net), {.mixed_precision = std::move(precision)});
};

TEST(DdpMixed, StepsAreThoseOfACopyInFewerBits) {
  for (const HostOfRank& hosts : {HostOfRank{"a"}, HostOfRank{"a", "a"}, kTwoEach})
    expect_steps_of_such_a_copy<FsdpNet>(hosts, kBFloat16, kWrap, kLossOfFsdpNet);
}

TEST(DdpMixed, Models) { expect_models(kWrap); }

struct ResNet : nn::Module {
  nn::Sequential layers = register_module("layers", resnet18());
  Tensor forward(const Tensor& x) { return layers->forward(x); }
};

TEST(DdpMixed, AResNet) {
  expect_steps_of_such_a_copy<ResNet>({"a", "a"}, kBFloat16, kWrap,
                                      [](auto& net, int rank, int step, at::ScalarType dtype) {
                                        const Tensor x = drawn(rank, step, {4, 3, 64, 64}).to(dtype);
                                        return net.forward(x).to(torch::kFloat).square().mean();
                                      });
}

TEST(DdpMixed, DtypesOfArgumentsParametersBuffersAndResults) {
  on_ranks(2, [](World&) { expect_dtypes(kWrap); });
}

TEST(DdpMixed, PartsWithDtypesOfTheirOwn) { expect_parts_with_their_own(kWrap); }

TEST(DdpMixed, GradientsOfALayerInFewerBitsOnTheirWay) { expect_gradients_of_a_layer_in_fewer_bits(kWrap); }

TEST(DdpMixed, EveryKindOfStep) {
  on_hosts(kTwoEach, [](World& world) { expect_every_kind_of_step(world, kWrap); });
}

// What a module computes by itself in bfloat16 with the values that the parameters have now.
Tensor in_bfloat16(const FsdpNet& net, const Tensor& x) {
  const torch::NoGradGuard no_grad;
  const auto low = make<FsdpNet>(7, {});
  for (const auto& item : net.named_parameters()) low->named_parameters()[item.key()].copy_(item.value());
  low->to(torch::kBFloat16);
  return low->forward(x.to(torch::kBFloat16)).to(torch::kFloat);
}

TEST(DdpMixed, CopiesFollowTheParameters) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    Ddp<FsdpNet> ddp(net, {.mixed_precision = kBFloat16});
    const Tensor x = fsdp_input(world.rank(), 0);
    const auto expect_now = [&](const char* what) {
      SCOPED_TRACE(what);
      for (const bool is_training : {true, false, true}) {
        net->train(is_training);
        EXPECT_TRUE(torch::equal(ddp(x), in_bfloat16(*net, x)));
      }
    };
    ddp(x).sum().backward();
    expect_now("at first");
    // libtorch's SGD leaves no trace in the version counter.
    torch::optim::SGD(net->parameters(), 0.1).step();
    expect_now("after a step");
    {
      const torch::NoGradGuard no_grad;
      net->b->bias.add_(1);
      net->c->weight.data()[300][300] = 9;
    }
    expect_now("after changes in place");
    std::stringstream archive;
    torch::save(std::static_pointer_cast<nn::Module>(other), archive);
    std::shared_ptr<nn::Module> module = net;
    {
      const c10::InferenceMode inference;
      torch::load(module, archive);
      EXPECT_TRUE(torch::equal(net->a->weight, other->a->weight));
      ddp(x);
    }
    expect_now("after torch::load()");
    for (const auto& parameter : net->parameters())
      parameter.set_data(torch::full_like(parameter, 0.01).t().contiguous().t());
    expect_now("after set_data() with other strides");
    const Tensor flat = torch::linspace(-1, 1, 600 * 600 + 600);
    net->b->weight.set_data(flat.narrow(0, 600, 600 * 600).view({600, 600}));
    net->b->bias.set_data(flat.narrow(0, 0, 600));
    expect_now("of parameters in one memory");
    flat.mul_(0.5);
    expect_now("whose memory changes");
    EXPECT_TRUE(torch::equal(net->b->bias, flat.narrow(0, 0, 600)));
  });
}

struct Throwing : FsdpNet {
  bool throws = false;
  Tensor forward(const Tensor& x) {
    EXPECT_EQ((a->weight + 0).scalar_type(), torch::kBFloat16);
    if (throws) throw std::runtime_error("no forward()");
    return FsdpNet::forward(x);
  }
};

// Also between forward() and backward(), when backward() does not average, and when forward() throws.
TEST(DdpMixed, TheModuleItselfHasItsParameters) {
  on_ranks(2, [](World& world) {
    const auto net = make<Throwing>(7, {});
    const auto other = make<FsdpNet>(7, {});
    auto ddp = std::make_unique<Ddp<Throwing>>(net, DdpOptions{.mixed_precision = kBFloat16});
    const Tensor x = fsdp_input(world.rank(), 0);
    const auto expect_parameters = [&] {
      EXPECT_TRUE(torch::equal(net->FsdpNet::forward(x), other->forward(x)));
      net->to(torch::kFloat);
      ModelAverager({.periods = {{1, {}}}}).average_parameters(net->parameters());
      expect_equal(*net, *other);
    };
    expect_parameters();
    const Tensor y = ddp->forward(x);
    EXPECT_TRUE(torch::equal(net->FsdpNet::forward(x), other->forward(x)));
    {
      const auto guard = ddp->no_sync();
      y.sum().backward();
    }
    expect_parameters();
    ddp->forward(x);
    expect_parameters();
    net->throws = true;
    EXPECT_THROW(ddp->forward(x), std::runtime_error);
    net->throws = false;
    expect_parameters();
    net->zero_grad();
    ddp->forward(x);
    ddp.reset();
    expect_parameters();
    // Two that live at the same time, and one without mixed precision.
    Ddp<FsdpNet> second(net, {.mixed_precision = kBFloat16}), third(net, {.mixed_precision = kBFloat16});
    for (int i = 0; i < 3; ++i)
      for (auto* const each : {&second, &third}) EXPECT_TRUE(torch::equal((*each)(x), in_bfloat16(*other, x)));
    Ddp<FsdpNet> fourth(net);
    EXPECT_TRUE(torch::equal(fourth(x), other->forward(x)));
    EXPECT_FALSE(parallel::is_shared(net->a->weight));
  });
}

TEST(DdpMixed, AnOldGraphDoesNotUseNewValues) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    Ddp<FsdpNet> ddp(net, {.mixed_precision = kBFloat16});
    torch::optim::AdamW optimizer(net->parameters());
    const Tensor loss = ddp(fsdp_input(world.rank(), 0)).sum();
    loss.backward({}, /*retain_graph=*/true);
    optimizer.step();
    EXPECT_CONTAINS(message_of<c10::Error>([&] { loss.backward(); }), "modified by an inplace operation");
  });
}

TEST(DdpMixed, WithShardsAndJoinAndDividedStates) {
  on_ranks(2, [](World& world) {
    // Weight decay reads the parameters, also in backward().
    const auto options = torch::optim::SGDOptions(1e-3).momentum(0.9).weight_decay(0.1);
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    Ddp<FsdpNet> ddp(net, {.bucket_cap_mb = 0.1, .first_bucket_cap_mb = 0.1, .mixed_precision = kBFloat16}),
        plain(other, {.bucket_cap_mb = 0.1, .first_bucket_cap_mb = 0.1, .mixed_precision = kBFloat16});
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(net->parameters(), options);
    torch::optim::SGD sgd(other->parameters(), options);
    ddp.register_comm_hook(zero.step_in_backward());
    const auto train = [&](Ddp<FsdpNet>& model, torch::optim::Optimizer& optimizer, int steps) {
      for (int step = 0; step < steps; ++step) {
        optimizer.zero_grad();
        model(fsdp_input(world.rank(), step)).square().sum().backward();
        optimizer.step();
      }
    };
    train(ddp, zero, 3);
    train(plain, sgd, 3);
    plain.join([&] { train(plain, sgd, 1 + world.rank()); }, {.after_backward = [&] { sgd.step(); }});
    ddp.join([&] { train(ddp, zero, 1 + world.rank()); }, {.after_backward = [&] { zero.step(); }});
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(torch::equal(item.value(), other->named_parameters()[item.key()])) << item.key();

    Ddp<FsdpNet> by_shards(net, {.reproducible = {.shards = 2}, .mixed_precision = kBFloat16});
    bool fails = true;
    const auto step_of_shards = [&] {
      return by_shards.backward_by_shards(0, [&](int shard) {
        if (fails) throw InvalidArgument("no loss");
        EXPECT_EQ((net->a->weight + 0).scalar_type(), torch::kBFloat16);
        return net->forward(fsdp_input(shard, 0).to(torch::kBFloat16)).to(torch::kFloat).square().sum();
      });
    };
    expect_refusal({"no loss"}, step_of_shards);
    EXPECT_EQ((net->a->weight + 0).scalar_type(), torch::kFloat);
    fails = false;
    net->zero_grad();
    other->zero_grad();
    step_of_shards();
    EXPECT_EQ((net->a->weight + 0).scalar_type(), torch::kFloat);
    plain(fsdp_input(world.rank(), 0)).square().sum().backward();
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(torch::allclose(item.value().grad(), other->named_parameters()[item.key()].grad(), 1e-5, 1e-6))
          << item.key();
  });
}

TEST(DdpMixed, GradientsInAnotherDtypeOnTheirWay) {
  for (const HostOfRank& hosts : {HostOfRank{"a", "a"}, kTwoEach})
    on_hosts(hosts, [&](World& world) {
      const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
      Ddp<FsdpNet> ddp(net, {.mixed_precision = {.reduce_dtype = torch::kBFloat16}}), exact(other);
      ddp(fsdp_input(world.rank(), 0)).square().sum().backward();
      exact(fsdp_input(world.rank(), 0)).square().sum().backward();
      for (const auto& item : net->named_parameters()) {
        const Tensor &grad = item.value().grad(), &expected = other->named_parameters()[item.key()].grad();
        EXPECT_EQ(grad.scalar_type(), torch::kFloat);
        EXPECT_LE((grad - expected).norm().item<double>(), 0.02 * expected.norm().item<double>());
        EXPECT_EQ(torch::equal(grad, expected), hosts.size() == 2);  // on one host, nothing travels
      }
    });
}

struct Changing : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(2, 2));
  Tensor forward(const Tensor& x) { return x.matmul(a->weight.to(torch::kBFloat16).mul_(2)); }
};

TEST(DdpMixed, BadUseIsRefused) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    EXPECT_CONTAINS(message_of<Mismatch>([&] {
                      const auto dtype = world.rank() == 0 ? torch::kBFloat16 : torch::kHalf;
                      Ddp<FsdpNet>(net, {.mixed_precision = {.param_dtype = dtype}});
                    }),
                    "differs from rank 0's");
    expect_refusal({"mixed_precision.param_dtype"},
                   [&] { Ddp<FsdpNet>(net, {.mixed_precision = {.param_dtype = torch::kLong}}); });
    expect_refusal({"reproducible does not go with mixed_precision.reduce_dtype"}, [&] {
      Ddp<FsdpNet>(net, {.reproducible = {.shards = 2}, .mixed_precision = {.reduce_dtype = torch::kHalf}});
    });
    const auto changing = std::make_shared<Changing>();
    Ddp<Changing> ddp(changing, {.mixed_precision = kBFloat16});
    expect_refusal({"change the copy of parameter a.weight", "clone()"}, [&] { ddp(torch::ones({2, 2})); });
  });
  on_ranks(1, [](World&) {
    const auto sharded = make<FsdpNet>(7, {});
    const auto model = fully_shard(sharded);
    expect_refusal({"belongs to a FullyShardedDataParallel", "FsdpOptions::mixed_precision"},
                   [&] { Ddp<FsdpNet>(sharded, {.mixed_precision = kBFloat16}); });
  });
}

}  // namespace
}  // namespace muster::test
