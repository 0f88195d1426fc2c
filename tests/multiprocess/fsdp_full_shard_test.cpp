// FullyShardedDataParallel with one copy of the parameters on all hosts together, which gather them.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <optional>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "parallel/shared_tensor.h"
#include "parallel/watched.h"
#include "shm/mapping.h"

namespace muster::test {
namespace {

FsdpOptions full(FsdpOptions options = {.unit_cap_mb = 1}) {
  options.strategy = ShardingStrategy::kFullShard;
  return options;
}
const HostOfRank kTwoEach{"a", "b", "b", "a"};

bool is_linear(const nn::Module& module) { return dynamic_cast<const nn::LinearImpl*>(&module) != nullptr; }

TEST(FsdpFullShard, StepsAreThoseOfDdp) {
  for (const auto& hosts : kPlacements) {
    SCOPED_TRACE(testing::PrintToString(hosts));
    on_hosts(hosts, [&](World& world) {
      const auto net = make<FsdpNet>(7 + static_cast<uint64_t>(world.rank()), {}), other = make<FsdpNet>(7, {});
      DistributedDataParallel ddp(other);
      train(ddp, *other, world);
      auto model = fully_shard(net, full());
      train(model, *net, world);
      for (const auto& parameter : net->parameters()) {
        EXPECT_EQ(parameter.grad().defined(), model.owner(parameter) == world.rank());
        EXPECT_EQ(parallel::belongs_to_another_rank(parameter), model.owner(parameter) != world.rank());
      }
      for (const double most : {1e9, 1e-3})
        for (const double type : {2.0, HUGE_VAL}) {
          const double norm = nn::utils::clip_grad_norm_(other->parameters(), most, type);
          EXPECT_GT(norm, 0);
          EXPECT_NEAR(model.clip_grad_norm_(most, type), norm, 1e-4 * norm);
        }
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
    EXPECT_EQ(names(full({.unit_cap_mb = 100})).size(), 1u);
    EXPECT_EQ(names(full({.unit_cap_mb = 1e-6})), names(full({.is_unit = is_linear})));  // a bias stays with its weight
    EXPECT_TRUE(names({}).empty());
  });
  on_hosts({"a", "a"}, [](World&) { EXPECT_TRUE(fully_shard(make<FsdpNet>(7, {}), full()).unit_names().empty()); });
}

// A chain of equal layers, which counts what is in memory at each.
struct Chain : nn::Module {
  static constexpr int kLayers = 8;
  nn::ModuleList layers{nn::ModuleList()};
  std::function<void()> at_layer = [] {};
  Chain() {
    for (int i = 0; i < kLayers; ++i) layers->push_back(nn::Linear(nn::LinearOptions(256, 256).bias(false)));
    register_module("layers", layers);
  }
  Tensor forward(Tensor x) {
    for (const auto& layer : *layers) {
      x = torch::relu(layer->as<nn::Linear>()->forward(x));
      at_layer();
      if (x.requires_grad()) x.register_hook([this](const Tensor&) { at_layer(); });
    }
    return x;
  }
};

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
    for (int step = 3; step < 4 + world.rank(); ++step) expect_same(step);
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

// Each rank stores what it owns, in one file or in several; a new job resumes to the bit.
TEST(FsdpFullShard, Snapshots) {
  const auto folder = std::filesystem::path(testing::TempDir()) / text("fsdp-full-", ::getpid());
  for (const bool sharded : {false, true}) {
    std::vector<Tensor> undisturbed;
    for (const bool again : {false, true}) {
      on_hosts(kTwoEach, [&](World& world) {
        const auto net = make<FsdpNet>(7, {});
        {  // dense, but not contiguous
          const torch::NoGradGuard no_grad;
          net->b->weight.set_data(net->b->weight.t().contiguous().t());
        }
        auto model = fully_shard(net, full());
        torch::optim::AdamW optimizer(net->parameters(), 1e-2);
        Snapshot snapshot({.folder = folder, .sharded = sharded, .default_generator = false});
        snapshot.add("model", net).add("optimizer", optimizer);
        const int64_t first = snapshot.restore();
        EXPECT_EQ(first, again ? 2 : 0);
        for (int64_t step = first; step < 4; ++step) {
          optimizer.zero_grad();
          model(fsdp_input(world.rank(), static_cast<int>(step))).square().sum().backward();
          optimizer.step();
          if (step == 1) snapshot.save(2);
        }
        model.gather();
        if (world.rank() == 0) {
          const auto now = copies(net->named_parameters()).values();
          if (!again) undisturbed = now;
          for (size_t i = 0; i < now.size(); ++i)
            EXPECT_TRUE(torch::equal(now[i], undisturbed[i])) << i << ": " << (now[i] - undisturbed[i]).abs().max();
        }
        model.synchronize();
        if (again) {
          Snapshot of_each({.folder = folder / "each", .sharded = sharded, .default_generator = false});
          of_each.add("model", net, {.per_rank = true});
          EXPECT_EQ(of_each.restore(), 0);
          expect_refusal({"none has all of it"}, [&] { of_each.save(1); });
        }
        // A part of the ranks has not all parameters.
        const Group some = world.new_group({0, 1});
        if (!again || !some.is_member()) return;
        Snapshot of_some({.folder = folder / "some", .sharded = sharded, .default_generator = false, .group = some});
        of_some.add("model", net);
        EXPECT_EQ(of_some.restore(), 0);
        expect_refusal({"all ranks of the FullyShardedDataParallel"}, [&] { of_some.save(1); });
      });
    }
    std::filesystem::remove_all(folder);
  }
}

TEST(FsdpFullShard, GradientsOfEveryKindOfStep) {
  on_hosts(kTwoEach, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), alone = make<FsdpNet>(7, {});
    auto model = fully_shard(net, full({.find_unused_parameters = true, .unit_cap_mb = 1}));
    const auto expect_same_gradients = [&](const char* what) {
      SCOPED_TRACE(what);
      for (const auto& item : net->named_parameters()) {
        const Tensor &grad = item.value().grad(), &expected = alone->named_parameters()[item.key()].grad();
        ASSERT_EQ(grad.defined(), expected.defined() && model.owner(item.value()) == world.rank()) << item.key();
        if (grad.defined()) {
          EXPECT_TRUE(torch::allclose(grad, expected, 1e-4, 1e-5)) << item.key();
        }
      }
      net->zero_grad();
      alone->zero_grad();
    };
    const auto x = [&](int rank, int step) { return fsdp_input(rank, step).requires_grad_(); };
    const auto alone_for_all = [&](const std::function<Tensor(int rank)>& loss) {
      for (int r = 0; r < 4; ++r) (loss(r) / 4).backward();
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

    const auto checkpointed = [&](FsdpNet& of, const Tensor& at) {
      const Tensor h =
          activation_checkpoint([&](const Tensor& y) { return torch::relu(of.b(torch::relu(of.a(y)))); }, at);
      return of.d(torch::relu(of.c(h))).sum();
    };
    model(x(world.rank(), 4));
    checkpointed(*net, x(world.rank(), 4)).backward();
    alone_for_all([&](int r) { return checkpointed(*alone, x(r, 4)); });
    expect_same_gradients("activation checkpoints");

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

TEST(FsdpFullShard, BadUseGetsOneSentence) {
  on_hosts(kTwoEach, [](World& world) {
    auto net = make<FsdpNet>(7, {});
    expect_refusal({"max_gathered_units 1"}, [&] { fully_shard(net, full({.max_gathered_units = 1})); });
    expect_refusal({"unit_cap_mb is 0"}, [&] { fully_shard(net, full({.unit_cap_mb = 0})); });
    const Tensor before = net->b->weight.detach().clone();
    std::optional model(fully_shard(net, full()));
    const int home = model->owner(net->b->weight);
    const auto host = [](int rank) { return kTwoEach[static_cast<size_t>(rank)]; };
    const auto expect_elsewhere = [&](const std::function<void()>& read) {
      if (host(home) == host(world.rank()))
        read();
      else
        expect_refusal({"the values of parameter b.weight are on another host", ""}, read);
    };
    expect_elsewhere([&] { net->b->weight.sum(); });
    expect_elsewhere([&] { net->b->weight.t().select(0, 1).sum(); });  // a view of a view
    expect_elsewhere([&] { torch::cat({net->b->weight, net->b->weight}); });
    expect_elsewhere([&] { net->b->weight.detach().clone(); });
    expect_refusal({"are on another host now", "gather() on all ranks"}, [&] { net->forward(fsdp_input(0, 0)); });
    EXPECT_EQ(torch::zeros_like(net->b->weight).sum().item<double>(), 0);
    EXPECT_EQ(torch::empty_like(net->b->weight).sizes(), before.sizes());
    EXPECT_EQ(net->b->weight.new_zeros({3}).sum().item<double>(), 0);
    model->gather();
    EXPECT_TRUE(torch::equal(net->b->weight, before));
    EXPECT_FALSE(parallel::is_watched(net->b->weight + 1));
    model->synchronize();
    expect_elsewhere([&] { net->b->weight.sum(); });

    // New values, from a file that every rank reads.
    const auto file =
        (std::filesystem::path(testing::TempDir()) / text("fsdp-full-", ::getpid(), world.rank())).string();
    const auto other = make<FsdpNet>(8, {});
    torch::save(other, file);
    torch::load(net, file);
    model->forward(fsdp_input(world.rank(), 0)).sum().backward();
    model->gather();
    EXPECT_TRUE(torch::equal(net->b->weight, other->b->weight));
    EXPECT_TRUE(parallel::is_watched(net->b->weight));
    std::filesystem::remove(file);

    // Whoever updates while others may read.
    model->forward(fsdp_input(world.rank(), 0));
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->owned_parameters()) parameter.mul_(1);
    }
    expect_refusal({" changed parameter ", "after a forward() that no backward() followed"},
                   [&] { model->forward(fsdp_input(world.rank(), 0)); });

    // A rank that does not own it changes it, while it is here.
    model->forward(fsdp_input(world.rank(), 0));
    if (world.rank() == (home + 1) % 4) {
      const torch::NoGradGuard no_grad;
      net->b->weight.mul_(1);
    } else {
      net->b->weight.sum();
    }
    expect_refusal({text("rank ", (home + 1) % 4, " changed parameter b.weight, which rank ", home, " owns")},
                   [&] { model->forward(fsdp_input(world.rank(), 0)); });
    // Another one, over the same module: it needs the values.
    expect_refusal({"are on another host now", "gather()"}, [&] { fully_shard(net, full()); });
    model->gather();
    const Values values = copies(net->named_parameters());
    {
      auto again = fully_shard(net, full({.unit_cap_mb = 0.1}));
      again(fsdp_input(world.rank(), 0)).sum().backward();
      again.gather();
      for (const auto& item : net->named_parameters()) EXPECT_TRUE(torch::equal(item.value(), values[item.key()]));
      again.synchronize();
    }
    model.reset();
    expect_elsewhere([&] { net->b->weight.sum(); });
  });
}

// Ranks that use parameters in another order find that out before they compute with wrong ones.
struct Choosing : Chain {
  int layer = 0;
  Tensor forward(const Tensor& x) { return layers[static_cast<size_t>(layer)]->as<nn::Linear>()->forward(x); }
};
TEST(FsdpFullShard, AnotherOrderIsAMismatch) {
  for (const int apart : {1, 2, 4}) {
    SCOPED_TRACE(apart);
    std::atomic<int> mismatches = 0;
    on_hosts(kApart, [&](World& world) {
      const auto net = make<Choosing>(7, {});
      auto model = fully_shard(net, full({.is_unit = is_linear}));
      net->layer = world.rank() * apart;
      try {
        for (int step = 0; step < 2; ++step) {
          model.forward(torch::ones({2, 256}));
          barrier();  // the other rank has left, if it threw
        }
      } catch (const Mismatch& error) {
        EXPECT_CONTAINS(error.what(), "in the same order");
        ++mismatches;
      } catch (const PeerLost&) {
      }
    });
    EXPECT_GE(mismatches, 1);
  }
  std::atomic<int> mismatches = 0;
  on_hosts({"a", "a", "b", "b"}, [&](World& world) {
    const auto net = make<Chain>(7, {});
    auto model = fully_shard(net, full({.is_unit = is_linear}));
    int at = 0;
    net->at_layer = [&] {
      if (++at == 3 && world.rank() == 0) (net->layers[1]->as<nn::Linear>()->weight + 1).sum();  // it is still here
    };
    try {
      model.forward(torch::ones({2, 256}));
    } catch (const Mismatch& error) {
      EXPECT_CONTAINS(error.what(), "the ranks of a host have used parameters in another order");
      ++mismatches;
    } catch (const PeerLost&) {
    }
  });
  EXPECT_GE(mismatches, 1);
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
