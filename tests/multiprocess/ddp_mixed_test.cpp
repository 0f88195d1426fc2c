// DistributedDataParallel in mixed precision.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <memory>
#include <optional>
#include <sstream>
#include <utility>

#include "base/text.h"
#include "multiprocess/mixed_support.h"

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

TEST(DdpMixed, DtypesOfArgumentsParametersBuffersAndResults) {
  on_ranks(2, [](World&) { expect_dtypes(kWrap); });
}

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
      for (const bool is_training : {true, false}) {
        net->train(is_training);
        EXPECT_TRUE(torch::equal(ddp(x), in_bfloat16(*net, x)));
      }
      net->train();
      ddp(x).sum().backward();  // after which the module itself computes with the parameters
      EXPECT_EQ((net->a->weight + 0).scalar_type(), torch::kFloat);
    };
    EXPECT_EQ((net->a->weight + 0).scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(net->forward(x), other->forward(x)));
    ddp(x);
    EXPECT_EQ((net->a->weight + 0).scalar_type(), torch::kBFloat16);  // until backward()
    ddp(x).sum().backward();
    expect_now("at first");
    // libtorch's SGD leaves no trace in the version counter.
    torch::optim::SGD sgd(net->parameters(), 0.1);
    sgd.step();
    expect_now("after a step");
    {
      const torch::NoGradGuard no_grad;
      net->b->bias.add_(1);
      net->c->weight.data().mul_(2);
    }
    net->eval();
    EXPECT_TRUE(torch::equal(ddp(x), in_bfloat16(*net, x)));
    expect_now("after changes in place");
    std::stringstream archive;
    torch::save(std::static_pointer_cast<nn::Module>(other), archive);
    std::shared_ptr<nn::Module> module = net;
    torch::load(module, archive);
    EXPECT_TRUE(torch::equal(net->a->weight, other->a->weight));
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

// An evaluation by itself, and a backward() that throws, leave the module as it was.
TEST(DdpMixed, TheModuleItselfComputesWithItsParameters) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    auto ddp = std::make_unique<Ddp<FsdpNet>>(net, DdpOptions{.mixed_precision = kBFloat16});
    const Tensor x = fsdp_input(world.rank(), 0);
    net->eval();
    ddp->forward(x);
    EXPECT_TRUE(torch::equal(net->forward(x), other->forward(x)));
    net->train();
    ddp->forward(x);
    ddp.reset();
    EXPECT_TRUE(torch::equal(net->forward(x), other->forward(x)));
    // Another one over the same module; and one without mixed precision.
    Ddp<FsdpNet> second(net, {.mixed_precision = kBFloat16});
    EXPECT_TRUE(torch::equal(second(x), in_bfloat16(*other, x)));
    second(x).sum().backward();
    Ddp<FsdpNet> third(net);
    EXPECT_TRUE(torch::equal(third(x), other->forward(x)));
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
    Ddp<FsdpNet> ddp(net, {.mixed_precision = kBFloat16});
    ddp(fsdp_input(world.rank(), 0));
    expect_refusal({"change the copy of parameter b.weight", "clone()"},
                   [&] { net->b->weight.to(torch::kBFloat16).mul_(2); });
    ddp(fsdp_input(world.rank(), 0)).sum().backward();
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
