// FullyShardedDataParallel with one copy of the parameters on all hosts together: what is refused.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <optional>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "parallel/tape/watched.h"

namespace muster::test {
namespace {

TEST(FsdpFullShard, BadUseGetsOneSentence) {
  on_hosts(kTwoEach, [](World& world) {
    auto net = make<FsdpNet>(7, {});
    expect_refusal({"max_gathered_units", "and 2 or more, got", "and 1"},
                   [&] { fully_shard(net, full({.max_gathered_units = 1})); });
    expect_refusal({"unit_cap_mb", "got 0 and"}, [&] { fully_shard(net, full({.unit_cap_mb = 0})); });
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
      expect_refusal({"belongs to another", "Destroy the other one"}, [&] { again(fsdp_input(world.rank(), 0)); });
      model.reset();
      again(fsdp_input(world.rank(), 0)).sum().backward();
      again.gather();
      for (const auto& item : net->named_parameters()) EXPECT_TRUE(torch::equal(item.value(), values[item.key()]));
      again.synchronize();
    }
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

}  // namespace
}  // namespace muster::test
