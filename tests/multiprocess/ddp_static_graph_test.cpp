// DdpOptions::static_graph: what the first backward() has used is what the later ones wait for. And how large buckets
// are where the user does not say.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "multiprocess/fsdp_support.h"
#include "muster/parallel/activation_checkpoint.h"
#include "muster/parallel/comm_hooks.h"
#include "parallel/kit/bucket_size.h"

namespace muster::test {
namespace {

constexpr int64_t kChosenWidth = 16, kChosenRows = 3;

// Five layers, of which forward() uses those that it is told to, each as often as it is told.
struct Chosen : nn::Module {
  std::vector<nn::Linear> layers;
  Chosen() {
    for (const char* name : {"a", "b", "c", "d", "e"})
      layers.push_back(register_module(name, nn::Linear(kChosenWidth, kChosenWidth)));
  }
  // Each use is a reentrant checkpoint of its own, so that a layer gets as many gradients as it has uses.
  Tensor forward(Tensor x, const std::string& names, bool throws = false) {
    for (const char name : names) {
      const auto layer = layers.at(static_cast<size_t>(name - 'a'));
      const bool throws_here = throws && name == names.front();  // when backward() has come to the others
      const auto block = [layer, throws_here](const Tensor& y) {
        if (throws_here && torch::GradMode::is_enabled()) throw std::runtime_error("in a block");
        return torch::tanh(layer.ptr()->forward(y));
      };
      x = activation_checkpoint({.preserve_rng_state = false, .reentrant = true}, block, x);
    }
    return x;
  }
};
std::shared_ptr<Chosen> make_chosen() {
  return make<Chosen>(5, [](nn::Module& net) { net.to(torch::kDouble); });
}
Tensor input(int rank, int step) {
  return drawn(rank, step, {kChosenRows, kChosenWidth}).to(torch::kDouble).requires_grad_();  // a checkpoint needs one
}

DdpOptions static_graph(double cap = 16.0 / (1 << 20)) {
  return {.bucket_cap_mb = cap, .first_bucket_cap_mb = cap, .static_graph = true};
}
using StaticDdp = DistributedDataParallel<Chosen>;

// One step of all ranks, and one of a process that has the whole batch.
void expect_step(StaticDdp& ddp, Chosen& alone, const World& world, int step, const std::string& names) {
  ddp.module()->zero_grad();
  alone.zero_grad();
  ddp(input(world.rank(), step), names).square().sum().backward();
  for (int rank = 0; rank < world.world_size(); ++rank)
    (alone.forward(input(rank, step), names).square().sum() / world.world_size()).backward();
  for (const auto& item : ddp.module()->named_parameters()) {
    const Tensor& expected = alone.named_parameters()[item.key()].grad();
    ASSERT_EQ(item.value().grad().defined(), expected.defined()) << item.key() << ", step " << step;
    if (expected.defined()) {
      EXPECT_LE(largest(item.value().grad() - expected), 1e-12) << item.key() << ", step " << step;
    }
  }
}

TEST(DdpStaticGraph, UnusedParametersAndSeveralUses) {
  for (const double cap : {16.0 / (1 << 20), 3000.0 / (1 << 20), 25.0})
    for (const HostOfRank& hosts : {HostOfRank{"a", "a"}, HostOfRank{"a", "a", "b"}})
      for (const std::string names : {"abce", "abcbe", "ba"})
        for (const bool with_hook : {false, true})
          on_hosts(hosts, [&](World& world) {
            const auto net = make_chosen(), alone = make_chosen();
            StaticDdp ddp(net, static_graph(cap));
            if (with_hook) ddp.register_comm_hook(comm_hooks::all_reduce);
            for (int step = 0; step < 4; ++step) {
              if (step == 2) {  // gradients of no_sync() are not compared, but added
                const auto guard = ddp.no_sync();
                ddp(input(world.rank(), 10), names).square().sum().backward();
              }
              expect_step(ddp, *alone, world, step, names);
            }
            EXPECT_TRUE(ddp.logging_data().has_rebuilt_buckets);
          });
}

// Layer d is between those that are used. Without static_graph its bucket is averaged at the end, and so are all that
// come after it.
TEST(DdpStaticGraph, NoBucketWaitsForAnUnusedParameter) {
  for (const bool is_static : {false, true})
    on_ranks(2, [&](World& world) {
      const auto net = make_chosen();
      DdpOptions options = static_graph();
      options.static_graph = is_static;
      options.find_unused_parameters = !is_static;
      StaticDdp ddp(net, options);
      int calls = 0, at_the_last = -1;
      ddp.register_comm_hook([&](GradBucket& bucket) {
        ++calls;
        return comm_hooks::all_reduce(bucket);
      });
      for (int step = 0; step < 2; ++step) {
        calls = 0;
        Tensor x = input(world.rank(), step);
        x.register_hook([&](const Tensor&) { at_the_last = calls; });
        ddp(x, "abce").square().sum().backward();
        EXPECT_EQ(calls, 10);
      }
      // All but the last one, which is averaged where backward() ends. Of e alone, where d is waited for.
      EXPECT_EQ(at_the_last, is_static ? 9 : 2);
    });
}

TEST(DdpStaticGraph, AnotherGraphIsNamedOnAllRanks) {
  struct Case {
    std::string first, second;  // of rank 0; rank 1 goes on with `first`
    std::string named, not_named;
  };
  const std::vector<Case> cases = {{.first = "abce", .second = "ace", .named = "b.", .not_named = "a."},
                                   {.first = "abce", .second = "abcde", .named = "d.", .not_named = "a."},
                                   {.first = "abbe", .second = "abe", .named = "b.", .not_named = "e."},
                                   {.first = "abe", .second = "abbe", .named = "b.", .not_named = "e."},
                                   // The average of e has begun when its second gradient comes, the last of all.
                                   {.first = "eab", .second = "eabe", .named = "e.", .not_named = "a."}};
  for (const Case& one : cases)
    for (const double cap : {16.0 / (1 << 20), 25.0})
      for (const int ranks : {1, 2, 3})
        on_ranks(ranks, [&](World& world) {
          SCOPED_TRACE(text(one.first, " ", one.second, " ", cap, " ", ranks));
          const auto net = make_chosen(), alone = make_chosen();
          StaticDdp ddp(net, static_graph(cap));
          for (int step = 0; step < 2; ++step) expect_step(ddp, *alone, world, step, one.first);
          const bool other = world.rank() == 0;
          const std::string message = message_of<InvalidArgument>([&] {
            net->zero_grad();
            ddp(input(world.rank(), 2), other ? one.second : one.first).square().sum().backward();
          });
          EXPECT_CONTAINS(message, "static_graph");
          if (other || message.find("that rank's error names") == std::string::npos) {
            EXPECT_CONTAINS(message, one.named);
          }
          EXPECT_EQ(message.find(one.not_named), std::string::npos) << message;
          expect_step(ddp, *alone, world, 3, one.first);
        });
}

TEST(DdpStaticGraph, TheFirstGraphMustBeThatOfAllRanks) {
  on_ranks(2, [](World& world) {
    const auto net = make_chosen(), alone = make_chosen();
    StaticDdp ddp(net, static_graph());
    const std::string message = message_of<InvalidArgument>(
        [&] { ddp(input(world.rank(), 0), world.rank() == 0 ? "abc" : "ab").square().sum().backward(); });
    EXPECT_CONTAINS(message, "on some ranks: c.weight, c.bias");
    EXPECT_EQ(message.find("d.weight"), std::string::npos) << message;
    for (int step = 1; step < 4; ++step)
      expect_step(ddp, *alone, world, step, "abbc");  // it is another, and is learned
  });
}

TEST(DdpStaticGraph, ABackwardThatThrowsOnARank) {
  for (const int failed : {0, 2})
    on_ranks(2, [&](World& world) {
      const auto net = make_chosen(), alone = make_chosen();
      StaticDdp ddp(net, static_graph());
      for (int step = 0; step < 5; ++step) {
        if (step != failed) {
          expect_step(ddp, *alone, world, step, "abce");
          continue;
        }
        net->zero_grad();
        const auto fails = [&] {
          ddp(input(world.rank(), step), "abce", /*throws=*/world.rank() == 1).square().sum().backward();
        };
        if (world.rank() == 1) {
          EXPECT_THROW(fails(), std::runtime_error);
        } else {
          message_of<InvalidArgument>(fails);
        }
      }
    });
}

// No parameter got a gradient in the first backward() on any rank: that says nothing of the order.
TEST(DdpStaticGraph, AFirstBackwardThatThrowsOnAllRanks) {
  on_ranks(2, [](World& world) {
    const auto net = make_chosen(), alone = make_chosen();
    StaticDdp ddp(net, static_graph());
    EXPECT_THROW(ddp(input(world.rank(), 0), "abce", /*throws=*/true).square().sum().backward(), std::runtime_error);
    net->zero_grad();
    EXPECT_FALSE(ddp.logging_data().has_rebuilt_buckets);
    for (int step = 1; step < 4; ++step) expect_step(ddp, *alone, world, step, "abce");
    EXPECT_TRUE(ddp.logging_data().has_rebuilt_buckets);
    EXPECT_TRUE(ddp.bucket_names().front().front().starts_with("e."));
  });
}

struct OneLinear : nn::Module {
  nn::Linear linear = register_module("linear", nn::Linear(kChosenWidth, 2));
  Tensor forward(const Tensor& x) { return linear(x); }
};

// Its graph is another one, and is neither learned nor compared.
TEST(DdpStaticGraph, BackwardWithCreateGraph) {
  on_ranks(2, [](World& world) {
    const auto net = make<OneLinear>(5, [](nn::Module& module) { module.to(torch::kDouble); });
    const Tensor& weight = net->linear->weight;
    DistributedDataParallel<OneLinear> ddp(net, {.static_graph = true});
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      const Tensor loss = ddp(input(world.rank(), step)).square().sum();
      if (step % 2 == 0) {
        loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
        const Tensor squares = weight.grad().square().sum();
        net->zero_grad();
        squares.backward();
      } else {
        loss.backward();
      }
      EXPECT_TRUE(weight.grad().defined());
    }
  });
}

TEST(DdpStaticGraph, JoinWithFewerBatchesOnARank) {
  on_ranks(2, [](World& world) {
    const auto net = make_chosen();
    StaticDdp ddp(net, static_graph());
    int steps = 0;
    ddp.join([&] {
      for (; steps < 3 + world.rank(); ++steps) {
        net->zero_grad();
        ddp(input(world.rank(), steps), "abce").square().sum().backward();
      }
    });
    EXPECT_EQ(steps, 3 + world.rank());
  });
}

TEST(DdpStaticGraph, BadUseIsRefused) {
  on_ranks(2, [](World& world) {
    EXPECT_CONTAINS(message_of<InvalidArgument>(
                        [] { StaticDdp(make_chosen(), {.static_graph = true, .reproducible = {.shards = 2}}); }),
                    "does not go with DdpOptions::static_graph");
    EXPECT_CONTAINS(message_of<InvalidArgument>(
                        [] { StaticDdp(make_chosen(), {.find_unused_parameters = true, .static_graph = true}); }),
                    "static_graph does not go with");
    EXPECT_CONTAINS(message_of<Mismatch>([&] { StaticDdp(make_chosen(), {.static_graph = world.rank() == 0}); }),
                    "static_graph");
    EXPECT_CONTAINS(message_of<Mismatch>([&] {
                      StaticDdp(make_chosen(), world.rank() == 0 ? DdpOptions() : DdpOptions{.bucket_cap_mb = 25});
                    }),
                    "measured");
  });
}

TEST(BucketSize, StartingABucketCostsATenthOfItsTime) {
  using std::chrono::microseconds;
  const auto mib = [](int few, int mebibyte) {
    return parallel::bucket_mib_for(microseconds(few), microseconds(mebibyte));
  };
  EXPECT_EQ(mib(2, 102), 1);           // shared memory
  EXPECT_EQ(mib(200, 9'000), 1);       // 1 Gbit/s, next door
  EXPECT_EQ(mib(1'000, 9'000), 2);     // a tenth of the time of 1.125 MiB
  EXPECT_EQ(mib(5'000, 14'000), 8);    // and of 5 MiB
  EXPECT_EQ(mib(50'000, 59'000), 25);  // another continent
  EXPECT_EQ(mib(100, 100), 25);
  EXPECT_EQ(mib(100, 50), 25);
}

TEST(BucketSize, AllRanksMeasureTheSameAndOnlyIfThereAreBucketsToMeasureFor) {
  constexpr double kTiny = 16.0 / (1 << 20);  // MiB
  for (const HostOfRank& hosts : {HostOfRank{"a"}, HostOfRank{"a", "a", "a"}, HostOfRank{"a", "b", "b"}})
    on_hosts(hosts, [&](World& world) {
      struct Made {
        uint64_t operations;
        double mib;
      };
      const auto made_with = [&](const DdpOptions& options) -> Made {
        const uint64_t before = world.group().stats().operations;
        const StaticDdp ddp(make_chosen(), options);
        return {world.group().stats().operations - before, ddp.logging_data().bucket_cap_mb};
      };
      const auto [measuring, mib] = made_with({.first_bucket_cap_mb = kTiny});
      const auto [with_size, given] = made_with({.bucket_cap_mb = 3, .first_bucket_cap_mb = kTiny});
      EXPECT_EQ(measuring, with_size + (hosts.size() > 1 ? 6 : 0));
      EXPECT_EQ(given, 3);
      EXPECT_EQ(made_with({}).operations, with_size);  // all gradients are in the first bucket
      Tensor all = torch::zeros({world.world_size()}, torch::kDouble);
      all_gather_into_tensor(all, torch::full({1}, mib, torch::kDouble));
      EXPECT_TRUE(all.eq(mib).all().item<bool>()) << all;
      EXPECT_GE(mib, parallel::kLeastBucketMiB);
      EXPECT_LE(mib, parallel::kMostBucketMiB);
    });
}

// One rank comes late to each of the five all_reduces, as if its messages were on their way for long.
TEST(BucketSize, ASlowStartMakesLargerBuckets) {
  WorldOptions options;
  for (uint64_t operation = 0; operation < 5; ++operation)
    options.faults.add(
        {.action = FaultAction::kDelay, .rank = 1, .operation = operation, .delay = std::chrono::milliseconds(100)});
  run_threads(
      2,
      [](World& world) {
        EXPECT_GT(parallel::measured_bucket_mib(world.group(), *world.shared_heap()), parallel::kLeastBucketMiB);
      },
      options);
}

}  // namespace
}  // namespace muster::test
