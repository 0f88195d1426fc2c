// memory_plan(): what it counts, to the byte.
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "multiprocess/fsdp_support.h"
#include "muster/optim/optimizers.h"
#include "muster/parallel/memory_plan.h"
#include "support/models.h"

namespace muster::test {
namespace {

constexpr size_t kLarge = 600 * 600 * 4, kAll = 2 * kLarge + (12 * 600 + 3 * 600 + 600 * 5 + 5) * 4;

// FsdpNet has two gradients of 1.4 MB, and small ones that share buckets on each rank.
void expect_rows(const MemoryPlan& plan, const std::vector<std::pair<size_t, size_t>>& expected) {
  std::vector<std::string> names{"parameters", "gradients", "optimizer states", "activations", "program"};
  const std::vector<std::string> more{"communication", "gathered units"};
  ASSERT_GE(plan.rows.size(), names.size());
  ASSERT_LE(plan.rows.size(), names.size() + more.size());
  const auto count = static_cast<std::ptrdiff_t>(plan.rows.size() - names.size());
  names.insert(names.begin() + 3, more.begin(), more.begin() + count);
  size_t sum = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(plan.rows[i].what, names[i]);
    sum += plan.rows[i].host;
    if (i >= expected.size()) continue;
    EXPECT_EQ(plan.rows[i].rank, expected[i].first) << names[i];
    EXPECT_EQ(plan.rows[i].host, expected[i].second) << names[i];
  }
  EXPECT_EQ(plan.host(), sum);
}

const MemoryPlan::Row& row(const MemoryPlan& plan, std::string_view what) {
  for (const MemoryPlan::Row& each : plan.rows)
    if (each.what == what) return each;
  throw InvalidArgument(text("the plan has no ", what), "");
}

TEST(MemoryPlan, CountsWhatEachWayOfTrainingNeeds) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    const size_t small = kAll - 2 * kLarge;
    for (const bool made : {false, true}) {
      // On their way: each rank owns one of the two large gradients, and computes both.
      expect_rows(
          memory_plan(*net, world, nullptr),
          {{kAll / 2, kAll}, {kLarge + small, 2 * kLarge + 2 * small}, {kAll, 2 * kAll}, {kLarge, 2 * kLarge}, {0, 0}});
      if (!made) auto model = fully_shard(net);
      barrier();
    }
    const auto other = make<FsdpNet>(7, {});
    other->a->weight.set_requires_grad(false);
    const size_t trained = kAll - 12 * 600 * 4;
    const auto plan = memory_plan(*other, world, nullptr, {.fully_sharded = false, .states = 1});
    expect_rows(plan, {{kAll, 2 * kAll}, {trained, 2 * trained}, {trained, 2 * trained}});
    EXPECT_EQ(plan.ranks, 2);
  });
}

// Each rank has a block for each size of which it does not own all gradients.
TEST(MemoryPlan, GradientsOnTheirWayToTheirOwners) {
  on_ranks(3, [](World& world) {
    struct Sizes : nn::Module {
      explicit Sizes(std::vector<int64_t> mib) {
        for (const int64_t each : mib)
          register_parameter(text("p", each, parameters().size()), torch::zeros({each << 18}));
      }
    };
    const auto on_their_way = [&](const std::vector<int64_t>& mib, const MemoryPlanOptions& options = {}) {
      const MemoryPlan plan = memory_plan(Sizes(mib), world, nullptr, options);
      const MemoryPlan::Row& on_their_way = row(plan, "communication");
      EXPECT_EQ(on_their_way.rank, on_their_way.host / 3);
      return on_their_way.host >> 20;
    };
    EXPECT_EQ(on_their_way({}), 0u);
    EXPECT_EQ(on_their_way({6}), 12u);           // on the two other ranks
    EXPECT_EQ(on_their_way({6, 5, 4}), 30u);     // each on the two others
    EXPECT_EQ(on_their_way({6, 6, 6, 6}), 18u);  // one block on each rank serves all that come
    const MemoryPlanOptions by_rows{.fsdp = {.divide_above_mb = 2}};
    EXPECT_EQ(on_their_way({6}, by_rows), 12u);     // a third is each rank's own
    EXPECT_EQ(on_their_way({6, 6}, by_rows), 18u);  // copies are each rank's own
  });
}

TEST(MemoryPlan, OfHostsWithDifferentNumbersOfRanks) {
  on_hosts({"a", "a", "b"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    const size_t here = world.rank() < 2 ? 2 : 1;
    expect_rows(memory_plan(*net, world, nullptr),  // one owner on each host
                {{kAll, kAll}, {kAll, here * kAll}, {2 * kAll, 2 * kAll}});
  });
}

// Of each host: its part, and the largest units that may be there, without what is at home.
TEST(MemoryPlan, OfHostsThatGather) {
  on_hosts(kApart, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    const MemoryPlanOptions options{.fsdp = {.strategy = ShardingStrategy::kFullShard, .unit_cap_mb = 1}};
    const size_t small = kAll - 2 * kLarge, gathered = (2 * kLarge + (12 * 600 + 3 * 600) * 4) / 2;
    const size_t gradients = kLarge + small,
                 moving = 2 * kLarge;  // its own, in buckets; on their way: all, below 25 MiB
    for (const bool made : {false, true}) {
      expect_rows(
          memory_plan(*net, world, nullptr, options),
          {{kAll / 2, kAll / 2}, {gradients, gradients}, {kAll, kAll}, {moving, moving}, {gathered, gathered}, {0, 0}});
      if (!made) auto model = fully_shard(net, options.fsdp);
      barrier();
    }
  });
}

// Copies in mixed precision exist once per host, and have half the bytes.
TEST(MemoryPlan, CopiesInMixedPrecision) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    const MemoryPlanOptions options{.fsdp = {.mixed_precision = {.param_dtype = torch::kBFloat16}}};
    const auto plan = memory_plan(*net, world, nullptr, options);
    ASSERT_EQ(plan.rows.size(), 7u);
    EXPECT_EQ(plan.rows[1].what, "copies");
    EXPECT_EQ(plan.rows[1].rank, kAll / 4);
    EXPECT_EQ(plan.rows[1].host, kAll / 2);
    EXPECT_EQ(plan.rows[0].host, kAll);
  });
}

// What the graph keeps: each storage once, no parameters; less where activations are computed again.
TEST(MemoryPlan, CountsWhatBackwardNeeds) {
  on_ranks(1, [](World& world) {
    const auto activations = [&](const nn::Module& net, const std::function<Tensor()>& forward) {
      return row(memory_plan(net, world, forward), "activations").host;
    };
    const auto net = make<FsdpNet>(7, {});
    const Tensor x = fsdp_input(0, 0);
    // The result of each relu, which relu and the next layer keep together. The input lives on.
    const size_t kept = 3 * 4 * 600 * 4;
    EXPECT_EQ(activations(*net, [&] { return net->forward(x).sum(); }), kept);
    EXPECT_EQ(activations(*net, [&] { return net->forward(x).sum() + net->forward(x).sum(); }), 2 * kept);
    EXPECT_EQ(
        activations(*net, [&] { return activation_checkpoint([&](const Tensor& y) { return net->forward(y); }, x); }),
        0u);
    EXPECT_EQ(activations(*net,
                          [&] {
                            const torch::NoGradGuard no_grad;
                            return net->forward(x);
                          }),
              0u);
    // Its own input counts, but not the data of which it is a part; nor does a graph that is gone before the end.
    const Tensor data = torch::randn({1000, 12});
    EXPECT_EQ(activations(*net, [&] { return net->forward(data.narrow(0, 8, 4)).sum(); }), kept);
    EXPECT_EQ(activations(*net, [&] { return net->forward(data.narrow(0, 8, 4).clone()).sum(); }), kept + 4 * 12 * 4);
    EXPECT_EQ(activations(*net,
                          [&] {
                            for (int i = 0; i < 3; ++i) net->forward(x);
                            return net->forward(x).sum();
                          }),
              kept);
    // The graph that was counted can be used, too.
    Tensor loss;
    activations(*net, [&] { return loss = net->forward(x).sum(); });
    loss.backward();
    const Tensor grad = net->b->weight.grad().clone();
    net->zero_grad();
    net->forward(x).sum().backward();
    EXPECT_TRUE(torch::equal(net->b->weight.grad(), grad));
  });
}

TEST(MemoryPlan, TheTable) {
  MemoryPlan plan;
  plan.ranks = 2;
  plan.rows = {{"parameters", 10 << 20, 20 << 20}, {"program", 100 << 20, 180 << 20}};
  const std::string planned =
      "                          each rank   this host, 2 ranks\n"
      "  parameters                 10 MiB               20 MiB\n"
      "  program                   100 MiB              180 MiB\n"
      "  planned                   110 MiB              200 MiB\n";
  EXPECT_EQ(plan.table(), planned);
  EXPECT_EQ(plan.table(205 << 20), planned + "  measured                                       205 MiB, 2.5 % more\n");
  EXPECT_EQ(plan.table(190 << 20), planned + "  measured                                       190 MiB, 5.0 % less\n");
}

// In the next two, processes share memory. (A sanitizer keeps freed memory. It runs no processes that fork.)
//
// The bytes of gradients that were on their way in more blocks than planned, because a rank was behind the others.
size_t bytes_of_late_ranks(const MemoryPlan& plan, World& world) {
  Tensor used = torch::tensor({static_cast<int64_t>(world.shared_heap()->used())});
  all_reduce(used);
  const auto all = static_cast<size_t>(used.item<int64_t>());
  return all - std::min(all, row(plan, "gradients").host + row(plan, "communication").host);
}

// Two ranks train some steps with Adam; what is there after a forward is what was planned, whether zero_grad() frees
// gradients or sets them to zero.
template <typename Net>
void expect_what_was_planned(const FsdpOptions& options = {}) {
  const auto ends = in_processes({"a", "a"}, [&](World& world) {
    torch::manual_seed(3);
    const auto net = std::make_shared<Net>();
    net->forward(world.rank(), 0).backward();  // libtorch sets itself up
    net->zero_grad();
    const MemoryPlan plan = memory_plan(*net, world, [&] { return net->forward(world.rank(), 0); }, {.fsdp = options});
    auto model = fully_shard(net, options);
    muster::AdamW optimizer(net->parameters(), {.lr = 1e-3});
    for (const bool to_none : {true, false}) {
      SCOPED_TRACE(to_none);
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad(to_none);
        model(world.rank(), step).backward();
        optimizer.step();
      }
      const Tensor graph = model(world.rank(), 2);
      const size_t measured = memory_of_host(world), late = bytes_of_late_ranks(plan, world);
      EXPECT_NEAR(static_cast<double>(measured - late) / static_cast<double>(plan.host()), 1, 0.1)
          << plan.table(measured) << late << " bytes of late ranks";
      optimizer.zero_grad(to_none);
      graph.backward();
    }
    return text("done");
  });
  for (const auto& end : ends) EXPECT_EQ(end.said, "done");
}

TEST(MemoryPlanProcess, ATransformerHasWhatWasPlanned) { expect_what_was_planned<Transformer>(); }
TEST(MemoryPlanProcess, AResNet18HasWhatWasPlanned) { expect_what_was_planned<ResNet18>(); }
TEST(MemoryPlanProcess, WideConvolutionsHaveWhatWasPlanned) { expect_what_was_planned<WideConvolutions>(); }
TEST(MemoryPlanProcess, AnLstmHasWhatWasPlanned) { expect_what_was_planned<Recurrent>(); }
TEST(MemoryPlanProcess, FrozenAndSharedParametersHaveWhatWasPlanned) {
  expect_what_was_planned<Mixed>({.find_unused_parameters = true});
}

TEST(MemoryPlanProcess, MemoryOfAHostCountsSharedPagesOnce) {
  const auto ends = in_processes({"a", "a", "b"}, [](World& world) {
    constexpr int64_t kFloats = 16 << 20;
    constexpr size_t kBytes = kFloats * 4;
    struct Wide : nn::Module {
      Tensor weight = register_parameter("weight", torch::ones({kFloats}));
      Tensor forward() { return weight.sum(); }
    };
    const auto net = std::make_shared<Wide>();
    const MemoryPlan plan = memory_plan(*net, world, nullptr);
    const size_t apart = memory_of_host(world);
    const auto near = [&](size_t bytes, size_t expected, double tolerance) {
      EXPECT_NEAR(static_cast<double>(bytes) / kBytes, static_cast<double>(expected) / kBytes, tolerance);
    };
    near(row(plan, "program").host, apart - static_cast<size_t>(world.rank() < 2 ? 2 : 1) * kBytes, 0.1);
    auto model = fully_shard(net);
    EXPECT_EQ(model().item<float>(), kFloats);  // each rank has touched it
    const size_t together = memory_of_host(world);
    const int64_t ranks = world.rank() < 2 ? 2 : 1;
    const auto freed = static_cast<double>(apart) - static_cast<double>(together);
    EXPECT_NEAR(freed / kBytes, static_cast<double>(ranks - 1), 0.25);
    near(row(memory_plan(*net, world, nullptr), "program").host, together - kBytes, 0.1);
    barrier();
    return std::string("done");
  });
  for (const auto& end : ends) EXPECT_EQ(end.said, "done");
}

}  // namespace
}  // namespace muster::test
