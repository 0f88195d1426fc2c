// FullyShardedDataParallel over several hosts, each with a copy of the parameters; and on ranks that are processes.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <stdexcept>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "parallel/kit/shared_tensor.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

TEST(FsdpHosts, EachHostHasOneCopyAndStepsAreThoseOfDdp) {
  for (const auto& hosts : kPlacements) {
    SCOPED_TRACE(testing::PrintToString(hosts));
    on_hosts(hosts, [&](World& world) {
      const auto net = make<FsdpNet>(7 + static_cast<uint64_t>(world.rank()), {}), other = make<FsdpNet>(7, {});
      DistributedDataParallel ddp(other);
      train(ddp, *other, world);
      auto model = fully_shard(net);
      train(model, *net, world);
      expect_equal(*net, *other);
      for (const auto& parameter : net->parameters())
        EXPECT_EQ(hosts[static_cast<size_t>(model.owner(parameter))], hosts[static_cast<size_t>(world.rank())]);
      expect_owners_alone_have_gradients(model, world);
      expect_same_norms(model, *other);
      for (const auto& item : net->named_parameters())
        if (const Tensor& grad = item.value().grad(); grad.defined()) {
          EXPECT_TRUE(torch::allclose(grad, other->named_parameters()[item.key()].grad(), 1e-4, 1e-9)) << item.key();
        }
      // What an owner writes, its host reads.
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : model.owned_parameters()) parameter.fill_(world.rank() + 1);
      }
      model.synchronize();
      for (const auto& parameter : net->parameters())
        EXPECT_TRUE(parameter.eq(model.owner(parameter) + 1).all().item<bool>());
    });
  }
}

// Several averages, of which one is in no_sync(), add up on every host.
TEST(FsdpHosts, GradientsAccumulate) {
  on_hosts({"a", "a", "b"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), alone = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    const auto backward = [&](int step) {
      model(fsdp_input(world.rank(), step)).sum().backward();
      for (int r = 0; r < 3; ++r) (alone->forward(fsdp_input(r, step)).sum() / 3).backward();
    };
    {
      const auto guard = model.no_sync();
      backward(0);
    }
    backward(1);
    backward(2);
    for (const auto& item : net->named_parameters()) {
      const Tensor& grad = item.value().grad();
      ASSERT_EQ(grad.defined(), model.owner(item.value()) == world.rank()) << item.key();
      if (!grad.defined()) continue;
      EXPECT_TRUE(torch::allclose(grad, alone->named_parameters()[item.key()].grad(), 1e-4, 1e-5)) << item.key();
    }
    const auto guard = model.no_sync();
    const auto loss = model(fsdp_input(world.rank(), 3)).sum();
    if (model.owned_parameters().empty()) return;  // then it has no average
    expect_refusal({text("which is an average that only rank ", world.rank(), " has on this host"), "zero_grad()"},
                   [&] { loss.backward(); });
  });
}

// A parameter is unused on all ranks but one, a gradient is not finite, and a backward() throws: as on one host.
TEST(FsdpHosts, TheHardCasesOfGradients) {
  on_hosts({"a", "a", "b", "b"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), alone = make<FsdpNet>(7, {});
    auto model = fully_shard(net, {.find_unused_parameters = true});
    const auto loss_of = [](FsdpNet& of, int rank, int step) {
      const Tensor y = torch::relu(of.a(fsdp_input(rank, step)));
      return rank == 3 ? of.d(y).sum() : y.sum();
    };
    bool fails = false;
    net->a->weight.register_hook([&](const Tensor&) {
      if (fails) throw std::runtime_error("in a hook");
    });
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      net->zero_grad();
      alone->zero_grad();
      model.synchronize();
      const auto before = [&] { model(fsdp_input(world.rank(), step)); };  // the forward() that begins a step
      if (step == 1) {
        before();
        fails = world.rank() == 2;
        const Tensor loss = loss_of(*net, world.rank(), step);
        if (fails)
          EXPECT_THROW(loss.backward(), std::exception);
        else
          loss.backward();
        fails = false;
        net->zero_grad();
      }
      before();
      loss_of(*net, world.rank(), step).backward();
      for (int r = 0; r < 4; ++r) (loss_of(*alone, r, step) / 4).backward();
      for (const auto& item : net->named_parameters()) {
        const Tensor &grad = item.value().grad(), &expected = alone->named_parameters()[item.key()].grad();
        const bool mine = model.owner(item.value()) == world.rank();
        ASSERT_EQ(grad.defined(), mine && expected.defined()) << item.key();
        if (grad.defined()) {
          EXPECT_TRUE(torch::allclose(grad, expected, 1e-4, 1e-5)) << item.key();
        }
      }
    }
    for (const int bad : {0, 3}) {  // on one host only: all ranks know
      model.synchronize();
      loss_of(*net, world.rank(), 0).backward();
      if (world.rank() / 2 == bad / 2)
        for (const auto& parameter : model.owned_parameters())
          if (parameter.grad().defined()) parameter.mutable_grad().view(-1)[0] = std::nan("");
      EXPECT_FALSE(std::isfinite(model.clip_grad_norm_(1)));
      net->zero_grad();
    }
  });
}

// Any group of ranks, whose first need not be on the World's first host; and modules that need no gradients.
TEST(FsdpHosts, GroupsOverHosts) {
  on_hosts({"a", "a", "b", "b"}, [](World& world) {
    const Group group = world.new_group({3, 0, 2});
    if (!group.is_member()) return;
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    DistributedDataParallel ddp(other, {.group = group});
    auto model = fully_shard(net, {.group = group});
    const auto step = [&](auto& of, FsdpNet& its) {
      torch::optim::AdamW optimizer(its.parameters());
      of(fsdp_input(world.rank(), 0)).square().sum().backward();
      optimizer.step();
      barrier({.group = group});
    };
    step(ddp, *other);
    step(model, *net);
    expect_equal(*net, *other);
    for (const auto& parameter : net->parameters()) EXPECT_EQ(model.owner(parameter), world.rank() == 0 ? 1 : 0);
    EXPECT_NEAR(model.clip_grad_norm_(1), nn::utils::clip_grad_norm_(other->parameters(), 1), 1e-3);

    const auto frozen = make<FsdpNet>(8, [](nn::Module& module) {
      for (auto& parameter : module.parameters()) parameter.set_requires_grad(false);
    });
    auto of_frozen = fully_shard(frozen, {.group = group});
    of_frozen(fsdp_input(0, 0));
    for (const auto& parameter : frozen->parameters()) EXPECT_TRUE(parallel::is_shared(parameter));
    EXPECT_EQ(of_frozen.clip_grad_norm_(1), 0);
  });
}

TEST(FsdpHosts, DifferentValuesOnHostsAreNamedOnEveryRank) {
  on_hosts({"a", "a", "b", "b"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    torch::optim::SGD optimizer(net->parameters(), 0.1);  // writes through data(), which no version counter sees
    const Tensor& weight = net->c->weight;
    const bool on_first = world.rank() < 2, owns = model.owner(weight) == world.rank();
    const int place = model.owner(weight) % 2;
    const auto forward = [&](int step) { return model(fsdp_input(world.rank(), step)).sum(); };
    const auto refused = [&] {
      expect_refusal(
          {"parameter c.weight has other values on the host of rank ", text("rank ", place), text("rank ", 2 + place)},
          [&] { forward(0); });
    };
    const auto fill = [&](double value) {
      const torch::NoGradGuard no_grad;
      if (owns) net->c->weight.fill_(value);
    };
    model.synchronize();
    if (on_first) fill(2);
    refused();
    refused();  // until the hosts are equal again
    if (!on_first) fill(2);
    forward(0).backward();

    // One host does more than a step, or less, or loads new values.
    for (const double host_b : {1.0, 0.0}) {
      optimizer.step();
      if (on_first) fill(3);
      if (!on_first && host_b > 0) fill(host_b);
      refused();
      fill(3);
      forward(1).backward();
    }
    const bool waits = on_first && owns;
    if (!waits) optimizer.step();
    expect_refusal({" has other values on the host of rank "}, [&] { forward(2); });
    if (waits) optimizer.step();
    forward(2).backward();
    if (on_first) net->c->weight.set_data(torch::full({600, 600}, 5.0));
    refused();
    net->c->weight.set_data(torch::full({600, 600}, 5.0));
    forward(3).backward();
    EXPECT_TRUE(weight.eq(5).all().item<bool>());
    EXPECT_TRUE(parallel::is_shared(weight));

    // A rank that does not own it: the message names the owner on its host.
    if (world.rank() == 3 - place) {
      const torch::NoGradGuard no_grad;
      net->c->weight.mul_(1);
    }
    expect_refusal({text("rank ", 3 - place, " changed parameter c.weight, which rank ", 2 + place, " owns")},
                   [&] { forward(4); });
    forward(4).backward();
  });
}

// --- ranks that are processes ---

TEST(FsdpProcess, StepsAreThoseOfDdp) {
  for (const HostOfRank& hosts : {HostOfRank{"a", "a", "a"}, HostOfRank{"a", "b", "a", "b"}}) {
    const auto ends = in_processes(hosts, [](World& world) {
      const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
      DistributedDataParallel ddp(net);
      train(ddp, *net, world);
      {
        auto model = fully_shard(other);
        train(model, *other, world);
      }
      expect_equal(*other, *net);
      barrier();
      return std::string("done");
    });
    for (const auto& end : ends) EXPECT_EQ(end.said, "done");
  }
}

// The rank that dies is named on every host, and what it owned stays readable.
TEST(FsdpProcess, TheDeathOfAnOwnerIsNamedAndItsMemoryStays) {
  for (const HostOfRank& hosts : {HostOfRank{"a", "a", "a"}, HostOfRank{"a", "a", "b", "b"}}) {
    const auto ends = in_processes(hosts, [](World& world) {
      const auto net = make<FsdpNet>(7, {}), first = make<FsdpNet>(7, {});
      auto model = fully_shard(net);
      const auto loss = model(fsdp_input(world.rank(), 0)).sum();
      if (world.rank() == 1) net->b->weight.register_hook([](const Tensor&) -> void { ::raise(SIGKILL); });
      const std::string what = message_of<PeerLost>([&] { loss.backward(); });
      EXPECT_CONTAINS(what, "rank 1");
      expect_equal(*net, *first);
      return std::string("done");
    });
    for (size_t rank = 0; rank < ends.size(); ++rank) {
      if (rank == 1)
        EXPECT_EQ(ends[rank].signal, SIGKILL);
      else
        EXPECT_EQ(ends[rank].said, "done");
    }
  }
}

}  // namespace
}  // namespace muster::test
