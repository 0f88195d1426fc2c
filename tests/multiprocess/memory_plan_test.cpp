// memory_plan(): what it counts, to the byte.
#include <gtest/gtest.h>
#include <torch/nn.h>

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
  if (plan.rows.size() > names.size()) names.insert(names.begin() + 3, {"communication", "gathered units"});
  ASSERT_EQ(plan.rows.size(), names.size());
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

TEST(MemoryPlan, CountsWhatEachWayOfTrainingNeeds) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    const size_t small = kAll - 2 * kLarge;
    for (const bool made : {false, true}) {
      expect_rows(memory_plan(*net, world, nullptr),
                  {{kAll / 2, kAll}, {kLarge + small, 2 * kLarge + 2 * small}, {kAll, 2 * kAll}, {0, 0}});
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
    ASSERT_EQ(plan.rows.size(), 6u);
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
      return memory_plan(net, world, forward).rows[3].host;
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
// Two ranks train some steps with Adam; what is there after a forward is what was planned.
TEST(MemoryPlanProcess, ATransformerHasWhatWasPlanned) {
  const auto ends = in_processes({"a", "a"}, [](World& world) {
    torch::manual_seed(3);
    const auto net = std::make_shared<Transformer>();
    net->forward(world.rank(), 0).backward();  // libtorch sets itself up
    net->zero_grad();
    const MemoryPlan plan = memory_plan(*net, world, [&] { return net->forward(world.rank(), 0); });
    auto model = fully_shard(net);
    muster::AdamW optimizer(net->parameters(), {.lr = 1e-3});
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad(false);
      model(world.rank(), step).backward();
      optimizer.step();
    }
    const Tensor graph = model(world.rank(), 2);
    const auto measured = static_cast<double>(memory_of_host(world)), planned = static_cast<double>(plan.host());
    EXPECT_NEAR(measured / planned, 1, 0.1) << plan.table(static_cast<size_t>(measured));
    graph.backward();
    return text("done");
  });
  for (const auto& end : ends) EXPECT_EQ(end.said, "done");
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
    near(plan.rows[4].host, apart - static_cast<size_t>(world.rank() < 2 ? 2 : 1) * kBytes, 0.1);
    auto model = fully_shard(net);
    EXPECT_EQ(model().item<float>(), kFloats);  // each rank has touched it
    const size_t together = memory_of_host(world);
    const int64_t ranks = world.rank() < 2 ? 2 : 1;
    const auto freed = static_cast<double>(apart) - static_cast<double>(together);
    EXPECT_NEAR(freed / kBytes, static_cast<double>(ranks - 1), 0.25);
    near(memory_plan(*net, world, nullptr).rows[4].host, together - kBytes, 0.1);
    barrier();
    return std::string("done");
  });
  for (const auto& end : ends) EXPECT_EQ(end.said, "done");
}

}  // namespace
}  // namespace muster::test
