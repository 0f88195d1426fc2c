// FullyShardedDataParallel with one copy of the parameters on all hosts together, which gather them.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "multiprocess/fsdp_support.h"
#include "shm/mapping.h"

namespace muster::test {
namespace {

TEST(FsdpFullShard, StepsAreThoseOfDdp) {
  for (const auto& hosts : kPlacements) {
    SCOPED_TRACE(testing::PrintToString(hosts));
    on_hosts(hosts, [&](World& world) {
      const auto net = make<FsdpNet>(7 + static_cast<uint64_t>(world.rank()), {}), other = make<FsdpNet>(7, {});
      DistributedDataParallel ddp(other);
      train(ddp, *other, world);
      auto model = fully_shard(net, full());
      train(model, *net, world);
      expect_owners_alone_have_gradients(model, world);
      expect_same_norms(model, *other);
      model.gather();
      expect_equal(*net, *other);
      model.synchronize();
    });
  }
}

// However units are chosen, and however few may be there.
TEST(FsdpFullShard, AnyUnits) {
  const std::vector<FsdpOptions> all = {
      full({.unit_cap_mb = 100}), full({.unit_cap_mb = 1e-6}), full({.unit_cap_mb = 1e-6, .max_gathered_units = 2}),
      full({.is_unit = is_linear, .max_gathered_units = 2}), full({.unit_cap_mb = 1, .reshard_after_forward = false})};
  on_hosts(kTwoEach, [&](World& world) {
    const auto other = make<FsdpNet>(7, {});
    DistributedDataParallel ddp(other);
    train(ddp, *other, world);
    for (size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(i);
      const auto net = make<FsdpNet>(7, {});
      auto model = fully_shard(net, all[i]);
      train(model, *net, world);
      model.gather();
      expect_equal(*net, *other);
      model.synchronize();
    }
  });
}

TEST(FsdpFullShard, UnitsHaveTheParametersOfAModuleOrNeighbours) {
  using Names = std::vector<std::vector<std::string>>;
  on_hosts(kApart, [](World&) {
    const auto names = [](const FsdpOptions& options) {
      return fully_shard(make<FsdpNet>(7, {}), options).unit_names();
    };
    EXPECT_EQ(names(full({.is_unit = is_linear})),
              (Names{{"a.weight", "a.bias"}, {"b.weight", "b.bias"}, {"c.weight", "c.bias"}, {"d.weight", "d.bias"}}));
    const auto is_b = [](const nn::Module& module) {
      const auto* const linear = dynamic_cast<const nn::LinearImpl*>(&module);
      return linear && linear->options.in_features() == 600 && linear->options.out_features() == 5;
    };
    EXPECT_EQ(names(full({.is_unit = is_b, .unit_cap_mb = 1.4})),
              (Names{{"a.weight", "a.bias"}, {"b.weight", "b.bias"}, {"c.weight", "c.bias"}, {"d.weight", "d.bias"}}));
    const auto is_any = [](const nn::Module&) { return true; };  // the innermost one counts
    EXPECT_EQ(names(full({.is_unit = is_any})), names(full({.is_unit = is_linear})));
    const auto net = make<FsdpNet>(7, {});  // one child by hand; the rest is a unit
    const auto is_mine = [&](const nn::Module& module) { return &module == net->b.get(); };
    EXPECT_EQ(fully_shard(net, full({.is_unit = is_mine, .unit_cap_mb = 100})).unit_names(),
              (Names{{"a.weight", "a.bias", "c.weight", "c.bias", "d.weight", "d.bias"}, {"b.weight", "b.bias"}}));
    EXPECT_EQ(names(full({.unit_cap_mb = 100})).size(), 1u);
    EXPECT_EQ(names(full({.unit_cap_mb = 1e-6})), names(full({.is_unit = is_linear})));  // a bias stays with its weight
    EXPECT_TRUE(names({}).empty());
  });
  on_hosts({"a", "a"}, [](World&) { EXPECT_TRUE(fully_shard(make<FsdpNet>(7, {}), full()).unit_names().empty()); });
}

TEST(FsdpFullShard, AHostHasItsOwnPartAndAFewUnits) {
  on_hosts(kApart, [](World& world) {
    const auto net = make<Chain>(7, {});
    auto model = fully_shard(net, full({.is_unit = is_linear}));
    const size_t kUnit = 256 * 256 * 4 + shm::page_size(), own = model.bytes_here();
    EXPECT_EQ(own, kUnit * Chain::kLayers / 2);
    std::vector<size_t> elsewhere;  // of the first units
    for (const auto& parameter : net->parameters())
      elsewhere.push_back((elsewhere.empty() ? 0 : elsewhere.back()) +
                          (model.owner(parameter) == world.rank() ? 0 : 1));
    size_t most = 0, at_first = 0;
    net->at_layer = [&] {
      if (at_first == 0) at_first = model.bytes_here();
      most = std::max(most, model.bytes_here());
    };
    torch::optim::AdamW optimizer(net->parameters());
    for (int step = 0; step < 3; ++step) {
      at_first = 0;
      model.forward(drawn(world.rank(), step, {2, 256})).sum().backward();
      EXPECT_EQ(model.bytes_here(), own);  // nothing else stays for the optimizer's time
      optimizer.step();
      // From the second step on, the next two are on their way with the first.
      EXPECT_EQ(at_first, own + elsewhere[step == 0 ? 0 : 2] * kUnit);
    }
    EXPECT_EQ(most, own + 2 * kUnit);  // of three neighbours, at most two are elsewhere
    model.gather();
    EXPECT_EQ(model.bytes_here(), kUnit * Chain::kLayers);
    model.synchronize();
    EXPECT_EQ(model.bytes_here(), own);
  });
}

TEST(FsdpFullShard, Evaluation) {
  on_hosts(kTwoEach, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    auto model = fully_shard(net, full());
    const auto expect_same = [&](int step) {
      EXPECT_TRUE(torch::equal(model(fsdp_input(world.rank(), step)), other->forward(fsdp_input(world.rank(), step))));
    };
    expect_same(0);
    net->eval();
    expect_same(1);
    {
      const torch::NoGradGuard no_grad;
      expect_same(2);
      const c10::InferenceMode inference;
      expect_same(3);
    }
    // After gather(), ranks may evaluate unequal parts.
    model.gather();
    for (int step = 3; step < 3 + world.rank(); ++step) expect_same(step);
    model.synchronize();
    net->train();
    expect_same(4);

    // One operator may use more than would stay.
    const auto all_of = [](const FsdpNet& of) { return torch::stack({of.b->weight, of.c->weight, of.b->weight}); };
    model.synchronize();
    auto small = fully_shard(make<FsdpNet>(8, {}), full({.unit_cap_mb = 1e-6, .max_gathered_units = 2}));
    const auto same = make<FsdpNet>(8, {});
    small(fsdp_input(0, 0));
    EXPECT_TRUE(torch::equal(all_of(*small.module()), all_of(*same)));
    const auto flat = [](const FsdpNet& of) {
      std::vector<Tensor> parts;
      for (const auto& parameter : of.parameters()) parts.push_back(parameter.flatten());
      return torch::cat(parts);
    };
    const size_t before = small.bytes_here();
    EXPECT_TRUE(torch::equal(flat(*small.module()), flat(*same)));
    (small.module()->a->bias + 1).sum();
    (small.module()->d->bias + 1).sum();
    EXPECT_LE(small.bytes_here(), before + (600 * 600 + 600 * 12) * 4);  // what it needed has gone
  });
}

TEST(FsdpFullShard, Groups) {
  on_hosts({"a", "a", "b", "b"}, [](World& world) {
    const Group group = world.new_group({3, 0, 2});
    if (!group.is_member()) return;
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    DistributedDataParallel ddp(other, {.group = group});
    auto model = fully_shard(net, full({.group = group, .unit_cap_mb = 1}));
    const auto step = [&](auto& of, FsdpNet& its) {
      torch::optim::AdamW optimizer(its.parameters());
      of(fsdp_input(world.rank(), 0)).square().sum().backward();
      optimizer.step();
    };
    step(ddp, *other);
    step(model, *net);
    model.gather();
    expect_equal(*net, *other);
    model.synchronize();
  });
}

TEST(FsdpFullShardProcess, StepsAreThoseOfDdp) {
  for (const HostOfRank& hosts : {HostOfRank{"a", "b"}, HostOfRank{"a", "b", "a", "b", "a"}}) {
    const auto ends = in_processes(hosts, [](World& world) {
      const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
      DistributedDataParallel ddp(net);
      train(ddp, *net, world);
      auto model = fully_shard(other, full({.unit_cap_mb = 0.01, .max_gathered_units = 2}));
      train(model, *other, world);
      model.gather();
      expect_equal(*other, *net);
      model.synchronize();
      // A pointer to what is not here: better a signal than zeros.
      const Tensor& weight = other->b->weight;
      int pipe[2];
      EXPECT_EQ(::pipe(pipe), 0);
      const bool is_here = model.owner(weight) % 2 == world.rank() % 2;
      EXPECT_EQ(::write(pipe[1], weight.const_data_ptr(), 1), is_here ? 1 : -1);
      if (!is_here) {
        EXPECT_EQ(errno, EFAULT);
      }
      for (const int fd : pipe) ::close(fd);
      barrier();
      return std::string("done");
    });
    for (const auto& end : ends) EXPECT_EQ(end.said, "done");
  }
}

// A rank dies in the middle of forward or backward, while others wait for what it owns.
TEST(FsdpFullShardProcess, ADeathIsNamedOnEveryHost) {
  for (const bool in_backward : {false, true}) {
    const auto ends = in_processes({"a", "a", "b", "b"}, [&](World& world) {
      const auto net = make<FsdpNet>(7, {});
      auto model = fully_shard(net, full());
      if (world.rank() == 1) {
        if (!in_backward) ::raise(SIGKILL);
        net->b->weight.register_hook([](const Tensor&) -> void { ::raise(SIGKILL); });
      }
      const std::string what = message_of<PeerLost>([&] { model(fsdp_input(world.rank(), 0)).sum().backward(); });
      EXPECT_CONTAINS(what, "rank 1");
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
