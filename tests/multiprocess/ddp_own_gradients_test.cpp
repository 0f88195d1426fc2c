// DistributedDataParallel and gradients that are the user's own: that a step does not use, that somebody holds, and
// complex ones, whose memory may have other values than they have.
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <memory>
#include <utility>
#include <vector>

#include "multiprocess/fsdp_support.h"
#include "muster/parallel/comm_hooks.h"

namespace muster::test {
namespace {

struct TwoBranches : nn::Module {
  Tensor small = register_parameter("small", torch::ones({6})),
         large = register_parameter("large", torch::ones({300'000})),
         other = register_parameter("other", torch::ones({6}));
  Tensor forward(bool uses_all) {
    const Tensor sum = (other * torch::arange(6)).sum();
    return uses_all ? sum + (2 * small).sum() + (2 * large).sum() : sum;
  }
};

// A parameter without a gradient on all ranks keeps the .grad that it had, to the bit.
TEST(DdpOwnGradients, StayWhereNoRankUsesTheParameter) {
  for (const bool with_hook : {false, true})
    on_ranks(3, [&](World& world) {
      const auto net = std::make_shared<TwoBranches>();
      DistributedDataParallel ddp(net, {.find_unused_parameters = true});
      if (with_hook) ddp.register_comm_hook(comm_hooks::bf16_compress);
      const auto own = [&](const Tensor& parameter) { return torch::full_like(parameter, 0.1 + world.rank()); };
      net->small.mutable_grad() = own(net->small);
      net->large.mutable_grad() = own(net->large);
      for (int step = 0; step < 3; ++step) {
        net->other.mutable_grad() = Tensor();
        ddp.forward(false).backward();
        EXPECT_TRUE(torch::equal(net->small.grad(), own(net->small))) << "in step " << step;
        EXPECT_TRUE(torch::equal(net->large.grad(), own(net->large))) << "in step " << step;
        EXPECT_TRUE(torch::equal(net->other.grad(), torch::arange(6).to(torch::kFloat)));
      }
      // Where some ranks use it, each adds to its own, and the sums are averaged.
      ddp.forward(world.rank() == 1).backward();
      const double expected = (3 * 0.1 + 0 + 1 + 2 + 2) / 3;
      EXPECT_TRUE(torch::allclose(net->small.grad(), torch::full({6}, expected), with_hook ? 1e-2 : 1e-5));
      EXPECT_TRUE(torch::allclose(net->large.grad(), torch::full({300'000}, expected), with_hook ? 1e-2 : 1e-5));
    });
}

// What a .grad was before zero_grad() is the holder's.
TEST(DdpOwnGradients, ThoseThatSomebodyHoldsDoNotChange) {
  for (const bool sharded : {false, true})
    on_ranks(2, [&](World& world) {
      const auto net = std::make_shared<TwoBranches>();
      std::unique_ptr<DistributedDataParallel<TwoBranches>> ddp;
      std::unique_ptr<FullyShardedDataParallel<TwoBranches>> fsdp;
      if (sharded)
        fsdp = std::make_unique<FullyShardedDataParallel<TwoBranches>>(net);
      else
        ddp = std::make_unique<DistributedDataParallel<TwoBranches>>(net);
      std::vector<std::pair<Tensor, Tensor>> held;  // with the values that they had
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        ((fsdp ? fsdp->forward(true) : ddp->forward(true)) * (step + 1 + world.rank())).backward();
        for (const Tensor& parameter : net->parameters())
          if (const Tensor& grad = parameter.grad(); grad.defined()) held.emplace_back(grad, grad.clone());
        for (const auto& [grad, before] : held)
          EXPECT_TRUE(torch::equal(grad, before))
              << "in step " << step << (sharded ? ", sharded, " : ", ") << grad.sizes();
      }
      EXPECT_GE(held.size(), 4U);
      if (fsdp) fsdp->synchronize();
    });
}

// Autograd conjugates some gradients only when they are read. Rank 0 holds its block, so that there the next gradient
// is copied, and on the other rank it is not.
TEST(DdpOwnGradients, ComplexOnesHaveTheirValues) {
  struct Complex : nn::Module {
    Tensor w = register_parameter("w", torch::ones({200'000}, torch::kComplexFloat));
    Tensor forward(const Tensor& x) { return torch::imag((w.conj() * x).sum()); }
  };
  on_ranks(2, [](World& world) {
    const auto net = std::make_shared<Complex>();
    DistributedDataParallel ddp(net);
    const auto x = [](int rank) {
      return torch::full({200'000}, c10::complex<float>(1.0F + rank, 2), torch::kComplexFloat);
    };
    Tensor alone = torch::ones({200'000}, torch::kComplexFloat).requires_grad_();
    for (const int rank : {0, 1}) (torch::imag((alone.conj() * x(rank)).sum()) / 2).backward();
    std::vector<Tensor> held;
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      ddp.forward(x(world.rank())).backward();
      EXPECT_TRUE(torch::allclose(net->w.grad(), alone.grad())) << "in step " << step;
      if (world.rank() == 0) held.push_back(net->w.grad());
    }
  });
}

TEST(DdpOwnGradients, ShardsOfAModuleThatIsPartlyFrozen) {
  for (const bool allows : {false, true})
    on_ranks(2, [&](World&) {
      const auto net = std::make_shared<TwoBranches>();
      DistributedDataParallel ddp(net, {.find_unused_parameters = allows, .reproducible = {.shards = 2}});
      const auto step = [&](uint64_t number) {
        net->zero_grad();
        ddp.backward_by_shards(number, [&](int) { return ddp->forward(true); });
      };
      step(0);
      net->small.set_requires_grad(false);
      if (allows) {
        step(1);
        EXPECT_FALSE(net->small.grad().defined());
        EXPECT_TRUE(net->large.grad().eq(2).all().item<bool>());
      } else {
        expect_refusal({"small", "frozen"}, [&] { step(1); });
      }
    });
}

}  // namespace
}  // namespace muster::test
