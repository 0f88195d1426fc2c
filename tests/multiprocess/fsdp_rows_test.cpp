// FullyShardedDataParallel with large parameters that ranks own by rows (FsdpOptions::divide_above_mb).
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <limits>
#include <memory>
#include <sstream>
#include <thread>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "parallel/fsdp/row_parts.h"

namespace muster::test {
namespace {

namespace fs = std::filesystem;

FsdpOptions by_rows(FsdpOptions options = {}) {
  options.divide_above_mb = 1;  // the weights of FsdpNet's b and c have 1.4
  return options;
}

const std::vector<HostOfRank> kManyPlacements = {
    {"a"}, {"a", "a"}, {"a", "a", "a"}, {"a", "a", "a", "a", "a"}, {"a", "a", "b"}, {"a", "b", "b", "a"}};

// Weights whose rows are, in memory, their columns.
void transpose_in_memory(FsdpNet& net) {
  const torch::NoGradGuard no_grad;
  net.b->weight.set_data(net.b->weight.t().contiguous().t());
}

TEST(FsdpRows, HowParametersAreDivided) {
  const auto meta = torch::TensorOptions(torch::kMeta).requires_grad(true);
  const auto tensor = [&](std::vector<int64_t> sizes, bool trained = true) {
    return torch::empty(sizes, meta.requires_grad(trained));
  };
  const Tensor channels_last =
      torch::empty({1, 4, 6, 5}, meta.memory_format(at::MemoryFormat::ChannelsLast));  // rows are those of a picture
  const auto parts = fsdp::divide_rows({{"small", tensor({5, 5})},
                                        {"frozen", tensor({100, 100}, false)},
                                        {"vector", tensor({301})},
                                        {"one", tensor({1, 1})},
                                        {"wide", tensor({3, 1000})},
                                        {"flat", tensor({1, 300})},
                                        {"picture", channels_last}},
                                       400);
  std::vector<std::string> names;
  for (const auto& part : parts) names.push_back(part.name);
  EXPECT_EQ(names, (std::vector<std::string>{"vector[0:75]", "vector[75:150]", "vector[150:225]", "vector[225:301]",
                                             "wide[0:1]", "wide[1:2]", "wide[2:3]", "flat[:,0:100]", "flat[:,100:200]",
                                             "flat[:,200:300]", "picture[:,:,0:3]", "picture[:,:,3:6]"}));
  int64_t end = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i == 0 || parts[i].parameter != parts[i - 1].parameter) end = 0;
    EXPECT_EQ(parts[i].range.offset, end) << parts[i].name;
    end += parts[i].range.elements;
  }
  EXPECT_EQ(end, channels_last.numel());
  EXPECT_EQ(parts.back().range.of(channels_last).numel(), parts.back().range.elements);
}

TEST(FsdpRows, AreBalancedAndSharedWithTheParameter) {
  for (const HostOfRank& hosts : {HostOfRank{"a", "a", "a"}, HostOfRank{"a", "a", "b", "b"}})
    on_hosts(hosts, [&](World& world) {
      const auto net = make<FsdpNet>(7, {});
      auto model = fully_shard(net, by_rows());
      const auto parameters = model.parameters();
      EXPECT_EQ(parameters.size(), 10u);
      std::vector<std::vector<int64_t>> shapes;
      for (const Tensor& each : parameters) shapes.push_back(each.sizes().vec());
      EXPECT_EQ(shapes[2], (std::vector<int64_t>{300, 600}));
      EXPECT_EQ(shapes[3], (std::vector<int64_t>{300, 600}));
      const int owners = hosts.size() == 3 ? 3 : 2;
      size_t mine = 0, all = 0;
      for (const Tensor& each : parameters) all += each.nbytes();
      for (const Tensor& each : model.owned_parameters()) mine += each.nbytes();
      // Without rows, one rank would have 1.4 MB more than the other, or a third rank nothing large.
      EXPECT_LE(mine, all / static_cast<size_t>(owners) + (720 << 10));
      if (owners == 2) {
        EXPECT_NEAR(static_cast<double>(mine), static_cast<double>(all) / 2, 60e3);
      }
      expect_refusal({"b.weight is divided into rows"}, [&] { model.owner(net->b->weight); });
      {
        const torch::NoGradGuard no_grad;
        for (Tensor& each : model.owned_parameters()) each.fill_(model.owner(each));
      }
      model.synchronize();
      EXPECT_TRUE(torch::equal(net->b->weight, torch::cat({parameters[2], parameters[3]})));
      for (const Tensor& each : parameters) EXPECT_TRUE(each.eq(model.owner(each)).all().item<bool>());
      model.synchronize();
    });
}

// The same, to the bit, as when each parameter has one owner.
void expect_same_steps(const HostOfRank& hosts, const FsdpOptions& options, const Prepare& prepare) {
  on_hosts(hosts, [&](World& world) {
    const auto net = make<FsdpNet>(7, prepare), whole = make<FsdpNet>(7, prepare);
    if (hosts.size() != 3) {
      transpose_in_memory(*net);
      transpose_in_memory(*whole);
    }
    auto model = fully_shard(net, by_rows(options)), as_before = fully_shard(whole, options);
    torch::optim::AdamW optimizer(model.parameters(), 1e-2), other(whole->parameters(), 1e-2);
    for (int step = 0; step < 4; ++step) {
      SCOPED_TRACE(step);
      optimizer.zero_grad();
      other.zero_grad();
      const Tensor x = fsdp_input(world.rank(), step).to(net->a->weight.scalar_type());
      const int backwards = step == 2 ? 2 : 1;
      if (step == 1) {
        const auto guard = model.no_sync();
        const auto other_guard = as_before.no_sync();
        model(2 * x).square().sum().backward();
        as_before(2 * x).square().sum().backward();
      }
      for (int i = 0; i < backwards; ++i) {
        model(x).square().sum().backward();
        as_before(x).square().sum().backward();
      }
      EXPECT_FALSE(net->b->weight.grad().defined());
      for (const Tensor& each : model.parameters())
        EXPECT_EQ(each.grad().defined(), model.owner(each) == world.rank()) << each.sizes();
      const double norm = model.clip_grad_norm_(1e9), expected = as_before.clip_grad_norm_(1e9);
      EXPECT_NEAR(norm, expected, 1e-4 * expected);
      optimizer.step();
      other.step();
    }
    EXPECT_EQ(optimizer.state().size(), model.owned_parameters().size());
    model.gather();
    as_before.gather();
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(torch::equal(item.value(), whole->named_parameters()[item.key()])) << item.key();
    model.synchronize();
    as_before.synchronize();
  });
}

TEST(FsdpRows, StepsAreThoseOfWholeParameters) {
  for (const HostOfRank& hosts : kManyPlacements) {
    SCOPED_TRACE(text(hosts.size(), " ranks, the last on host ", hosts.back()));
    expect_same_steps(hosts, {}, {});
    if (hosts.size() > 3) continue;
    expect_same_steps(hosts, {}, [](nn::Module& net) { net.to(torch::kDouble); });
    expect_same_steps(hosts, {.mixed_precision = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat}}, {});
  }
}

// Whose optimizer has other states then: they are of rows, of which there are as many on any number of ranks.
TEST(FsdpRows, SnapshotsCanBeRestoredOnAnotherNumberOfRanks) {
  const auto folder = fs::path(testing::TempDir()) / text("fsdp-rows-", ::getpid());
  const auto go_on = [&](const HostOfRank& hosts, const SnapshotOptions& options, int64_t first, int64_t last) {
    std::vector<Tensor> result;
    on_hosts(hosts, [&](World& world) {
      const auto net = make<FsdpNet>(7 + static_cast<uint64_t>(first), {});
      net->to(torch::kDouble);
      auto model = fully_shard(net, by_rows());
      torch::optim::AdamW optimizer(model.parameters(), 1e-2);
      Snapshot snapshot(options);
      snapshot.add("model", net).add("optimizer", optimizer);
      EXPECT_EQ(snapshot.restore(), first);
      for (int64_t step = first; step < last; ++step) {
        optimizer.zero_grad();
        model(fsdp_input(0, static_cast<int>(step)).to(torch::kDouble)).square().mean().backward();
        optimizer.step();
      }
      if (first == 0) snapshot.save(last);
      model.synchronize();
      if (world.rank() == 0) result = copies(net->named_parameters()).values();
      model.synchronize();
    });
    return result;
  };
  const auto expected = go_on({"a"}, {.folder = folder / "undisturbed", .default_generator = false}, 0, 4);
  for (const HostOfRank& from : {HostOfRank{"a", "a"}, HostOfRank{"a", "b", "b"}}) {
    for (const bool sharded : {false, true}) {
      const SnapshotOptions options{.folder = folder / "saved", .sharded = sharded, .default_generator = false};
      go_on(from, options, 0, 2);
      for (const HostOfRank& to : {HostOfRank{"a"}, HostOfRank{"a", "a", "a"}, HostOfRank{"a", "a", "b"}}) {
        const auto got = go_on(to, options, 2, 4);
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(torch::allclose(got[i], expected[i], 1e-9, 1e-9)) << (got[i] - expected[i]).abs().max();
      }
      fs::remove_all(options.folder);
    }
  }
  // One that divides otherwise has other parameters.
  on_ranks(2, [&](World&) {
    const auto net = make<FsdpNet>(7, {});
    net->to(torch::kDouble);
    auto model = fully_shard(net);
    torch::optim::AdamW optimizer(model.parameters(), 1e-2);
    Snapshot snapshot({.folder = folder / "undisturbed", .default_generator = false});
    snapshot.add("model", net).add("optimizer", optimizer);
    expect_refusal({"expected 8 parameters in a group", "got 12"}, [&] { snapshot.restore(); });
  });
  fs::remove_all(folder);
}

// On every rank, whoever has made the update.
TEST(FsdpRows, AnOldGraphDoesNotUseNewValues) {
  on_hosts({"a", "a", "b"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net, by_rows());
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    const Tensor old = net->c(torch::relu(net->b(torch::ones({2, 600}).requires_grad_()))).sum();
    model(fsdp_input(world.rank(), 0)).sum().backward();
    {
      const torch::NoGradGuard no_grad;
      for (Tensor& each : model.owned_parameters()) each.add_(1);
    }
    model(fsdp_input(world.rank(), 1)).sum().backward();
    const auto guard = model.no_sync();
    EXPECT_THROW(old.backward(), c10::Error);
    net->zero_grad();
  });
}

TEST(FsdpRows, ChangesThatBreakTheRulesAreFound) {
  on_hosts({"a", "a", "a"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net, by_rows());
    const auto parameters = model.parameters();
    const Tensor rows = parameters[2];
    const int owner = model.owner(rows), other = (owner + 1) % 3;
    const auto step = [&](int number) { model(fsdp_input(world.rank(), number)).sum().backward(); };
    const auto zero_grad = [&] {
      for (Tensor each : parameters) each.mutable_grad() = Tensor();
    };
    step(0);
    {
      const torch::NoGradGuard no_grad;
      if (world.rank() == other) Tensor(rows).add_(1);
    }
    expect_refusal({text("rank ", other, " changed parameter b.weight[0:300]"), text("rank ", owner, " owns")},
                   [&] { step(1); });
    zero_grad();

    const Tensor loss = model(fsdp_input(world.rank(), 2)).sum();
    {
      const torch::NoGradGuard no_grad;
      if (world.rank() == owner) Tensor(rows).add_(1);
    }
    expect_refusal({text("rank ", owner, " changed parameter b.weight[0:300]"), "synchronize()"}, [&] { step(3); });
    zero_grad();

    // Values that every rank loads are everybody's, and the rows'.
    model.synchronize();
    std::stringstream stream;
    torch::save(make<FsdpNet>(8, {}), stream);
    auto loaded = net;
    torch::load(loaded, stream);
    step(4);
    const auto expected = make<FsdpNet>(8, {});
    EXPECT_TRUE(torch::equal(net->b->weight, expected->b->weight));
    EXPECT_TRUE(torch::equal(rows, expected->b->weight.narrow(0, 0, 300)));
    zero_grad();
    step(5);
    model.synchronize();
  });
}

// As by vector_to_parameters().
TEST(FsdpRows, MayGetNewStorage) {
  on_hosts({"a", "a"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net, by_rows());
    model.synchronize();
    for (Tensor& each : model.owned_parameters()) each.set_data(torch::full_like(each, 0.01));
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    const Tensor loss = model(fsdp_input(world.rank(), 0)).sum();
    EXPECT_TRUE(net->b->weight.eq(0.01F).all().item<bool>());
    loss.backward();
    optimizer.step();
    model.synchronize();
    EXPECT_FALSE(net->b->weight.eq(0.01F).any().item<bool>());
    EXPECT_TRUE(torch::equal(net->b->weight, torch::cat({model.parameters()[2], model.parameters()[3]})));
    model.synchronize();
  });
}

// The weights of b and c have one size, so the block of one gradient serves the next one: no gradient of the user keeps
// it.
TEST(FsdpRows, BlocksOfGradientsAreUsedAgain) {
  on_hosts({"a", "a"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net, by_rows());
    std::vector<Tensor> kept;
    for (int step = 0; step < 4; ++step) {
      model(fsdp_input(world.rank(), step)).sum().backward();
      for (Tensor each : model.parameters()) {
        if (each.grad().defined() && each.dim() == 2 && each.size(0) == 300) {
          EXPECT_FALSE(world.heap().contains(each.grad().data_ptr()));
          kept.push_back(each.grad());
        }
        each.mutable_grad() = Tensor();
      }
      EXPECT_LT(world.heap().used(), 3 * net->b->weight.nbytes());
    }
    EXPECT_EQ(kept.size(), 8u);
  });
}

// While other ranks update their rows, nobody looks at the parameter.
TEST(FsdpRows, OneRankMayBeLate) {
  on_hosts({"a", "a", "b", "b"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net, by_rows());
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      model(fsdp_input(world.rank(), step)).square().mean().backward();
      if (world.rank() == step % 4) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      optimizer.step();
    }
    model.synchronize();
  });
}

TEST(FsdpRows, ABackwardThatThrowsLeavesNothing) {
  on_hosts({"a", "a"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), alone = make<FsdpNet>(7, {});
    auto model = fully_shard(net, by_rows());
    const Tensor y = model(fsdp_input(world.rank(), 0));
    if (world.rank() == 1) {  // after c, and before b
      Tensor middle = torch::relu(net->b(torch::relu(net->a(fsdp_input(1, 0)))));
      middle.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("in the middle"); });
      EXPECT_THROW(net->d(torch::relu(net->c(middle))).sum().backward(), std::runtime_error);
    } else {
      expect_refusal({"without a gradient", "on some ranks"}, [&] { y.sum().backward(); });
    }
    for (Tensor each : model.parameters()) each.mutable_grad() = Tensor();
    net->zero_grad();
    model(fsdp_input(world.rank(), 1)).sum().backward();
    for (int rank : {0, 1}) (alone->forward(fsdp_input(rank, 1)).sum() / 2).backward();
    const auto parameters = model.parameters();
    const Tensor expected = alone->b->weight.grad();
    for (size_t part : {2, 3}) {
      if (model.owner(parameters[part]) != world.rank()) continue;
      EXPECT_TRUE(torch::allclose(parameters[part].grad(), expected.narrow(0, part == 2 ? 0 : 300, 300), 1e-4, 1e-5));
    }
  });
}

// On ranks that do not use it, and on none.
TEST(FsdpRows, UnusedParameters) {
  on_hosts({"a", "a", "a"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), alone = make<FsdpNet>(7, {});
    auto model = fully_shard(net, by_rows({.find_unused_parameters = true}));
    const auto parameters = model.parameters();
    const Tensor x = torch::ones({2, 600});
    model(fsdp_input(world.rank(), 0));
    (world.rank() == 1 ? net->d(net->b(x)) : net->d(x)).sum().backward();
    (alone->d(alone->b(x)).sum() / 3).backward();
    const Tensor expected = alone->b->weight.grad();
    for (size_t part : {2, 3})
      if (model.owner(parameters[part]) == world.rank()) {
        ASSERT_TRUE(parameters[part].grad().defined());
        EXPECT_TRUE(torch::allclose(parameters[part].grad(), expected.narrow(0, part == 2 ? 0 : 300, 300), 1e-4, 1e-5));
      }
    for (const size_t part : {5, 6}) EXPECT_FALSE(parameters[part].grad().defined());  // of c.weight
  });
}

TEST(FsdpRows, BadUse) {
  on_hosts({"a", "b"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    for (const double wrong : {0.5, -1.0, std::numeric_limits<double>::quiet_NaN()})
      expect_refusal({"divide_above_mb", "at least 1"}, [&] { fully_shard(net, {.divide_above_mb = wrong}); });
    expect_refusal({"kFullShard over several hosts"}, [&] { fully_shard(net, by_rows(full())); });
    EXPECT_THROW(fully_shard(net, {.divide_above_mb = world.rank() == 0 ? 1.0 : 2.0}), Mismatch);
  });
}

}  // namespace
}  // namespace muster::test
