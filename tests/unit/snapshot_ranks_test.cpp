// Snapshots that any number of ranks saves, and any other number restores.
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "checkpoint/container.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/comm/world.h"
#include "muster/data/sampler.h"
#include "muster/optim/grad_scaler.h"
#include "muster/optim/lr_scheduler.h"
#include "muster/optim/optimizers.h"
#include "muster/parallel/averaged_model.h"
#include "support/full_run.h"
#include "support/temporary_folder.h"

namespace muster::test::any_ranks {
namespace {

constexpr int kMostRanks = 8;
constexpr size_t kSamples = 8 * 840;  // a multiple of 1 to 8 at each step
constexpr size_t kPerStep = 840;

// Tensors of fewer elements than there are ranks, and one that a sharded snapshot does not leave with rank 0.
struct Net : torch::nn::Module {
  Net() {
    const std::map<std::string, std::vector<int64_t>> shapes = {
        {"scalar", {}}, {"none", {0}}, {"one", {1}}, {"three", {3}}, {"large", {150, 140}}};
    for (const auto& [name, shape] : shapes) register_parameter(name, torch::zeros(shape));
    register_buffer("counts", torch::zeros({3}, torch::kLong));
    register_buffer("no_counts", torch::zeros({0}, torch::kLong));
  }
};

// Its state after a step depends on the state before, and not on the rank.
struct Training {
  explicit Training(const World& world)
      : sampler(kSamples, {.num_replicas = world.world_size(), .rank = world.rank(), .seed = 5}) {}

  void add_to(Snapshot& snapshot) {
    snapshot.add("net", net)
        .add("adamw", adamw)
        .add("sampler", sampler, {.per_rank = false})
        .add("scaler", scaler, {.per_rank = false})
        .add("schedule", schedule, {.per_rank = false})
        .add("averages", averages, {.per_rank = false})
        .add("steps", steps, {.per_rank = false});
  }
  void step() {
    ++steps;
    for (auto& parameter : net.parameters())
      parameter.mutable_grad() =
          torch::cos(parameter.detach() * 3 + torch::arange(parameter.numel()).view_as(parameter) + steps);
    adamw.step();
    schedule.step();
    averages.update();
    const torch::NoGradGuard no_grad;
    net.named_buffers()["counts"] += steps;
    scaler.update(1024.0 * static_cast<double>(steps));
    sampler.next(kPerStep / static_cast<size_t>(sampler.num_replicas()));
  }
  std::map<std::string, torch::Tensor> state() const {
    auto all = adamw.state_dict();
    for (const auto& item : net.named_parameters()) all["net." + item.key()] = item.value().detach().clone();
    for (const auto& item : net.named_buffers()) all["net." + item.key()] = item.value().clone();
    for (const auto& item : net.named_parameters()) all["average." + item.key()] = averages.average(item.key()).clone();
    all["rate"] = torch::tensor(adamw.param_groups()[0].options().get_lr(), torch::kDouble);
    all["scale"] = torch::tensor(scaler.get_scale());
    all["steps"] = torch::tensor(steps);
    all["samples"] = torch::tensor(static_cast<int64_t>(sampler.index()) * sampler.num_replicas());
    return all;
  }

  Net net;
  muster::AdamW adamw{net.parameters(), {.lr = 0.1}};
  DistributedSampler sampler;
  GradScaler scaler;
  optim::OneCycleLR schedule{adamw, {.max_lr = 0.1, .total_steps = 40}};
  AveragedModel averages{net, {.decay = 0.5}};
  int64_t steps = 0;
};

void expect_equal(const Training& training, const std::map<std::string, torch::Tensor>& expected) {
  const auto state = training.state();
  EXPECT_EQ(state.size(), expected.size());
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(state.contains(name)) << name;
    EXPECT_TRUE(at::equal(state.at(name), value)) << name;
  }
}

using Pairs = std::vector<std::pair<int, int>>;
Pairs pairs() {
  if (!full_run()) return {{1, 8}, {8, 1}, {3, 2}, {5, 7}};
  Pairs all;
  for (int before = 1; before <= kMostRanks; ++before)
    for (int after = 1; after <= kMostRanks; ++after) all.emplace_back(before, after);
  return all;
}

class SnapshotRanks : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Files, SnapshotRanks, testing::Bool(),
                         [](const auto& info) { return info.param ? "sharded" : "one"; });

TEST_P(SnapshotRanks, AnyNumberGoesOnWithWhatAnyOtherHasSaved) {
  const TemporaryFolder folder;
  const auto options = [&](int before) {
    return SnapshotOptions{.folder = folder / text("of-", before), .sharded = GetParam(), .default_generator = false};
  };
  std::map<std::string, torch::Tensor> saved, next;
  run_threads(1, [&](World& world) {
    Training alone(world);
    alone.step();
    alone.step();
    saved = alone.state();
    alone.step();
    next = alone.state();
  });
  for (const auto& [before, after] : pairs()) {
    SCOPED_TRACE(testing::Message() << "from " << before << " to " << after << " ranks");
    if (!std::filesystem::exists(options(before).folder)) {
      run_threads(before, [&](World& world) {
        Training training(world);
        Snapshot snapshot(options(world.world_size()));
        training.add_to(snapshot);
        EXPECT_EQ(snapshot.restore(), 0);
        training.step();
        training.step();
        snapshot.save(2);
      });
    }
    run_threads(after, [&, from = before](World& world) {
      Training training(world);
      Snapshot snapshot(options(from));
      training.add_to(snapshot);
      EXPECT_EQ(snapshot.restore(), 2);
      expect_equal(training, saved);
      training.sampler.reset();
      training.step();
      expect_equal(training, next);
    });
  }
}

// Each rank's file has about as much, and each tensor is in one of them.
TEST(SnapshotShards, AModelsTensorsAreDividedAmongTheRanks) {
  constexpr int64_t kWidth = 200, kTensors = 7;
  constexpr size_t kOne = kWidth * kWidth * sizeof(float);
  for (const int n : {1, 2, 3, 4}) {
    SCOPED_TRACE(n);
    const TemporaryFolder folder;
    run_threads(n, [&](World&) {
      torch::nn::Module net;
      for (int i = 0; i < kTensors; ++i) net.register_parameter(text("w", i), torch::zeros({kWidth, kWidth}));
      Snapshot snapshot({.folder = folder / "it", .sharded = true, .default_generator = false});
      snapshot.add("net", net).save(1);
    });
    std::multiset<std::string> names;
    size_t least = kTensors, most = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder / "it")) {
      if (entry.path().filename() == "step-1.snapshot.safetensors") continue;  // the manifest
      const auto file = checkpoint::Container::open(entry.path());
      for (const auto& each : file.entries()) {
        names.insert(each.name);
        EXPECT_EQ(each.tensor.nbytes(), kOne);
      }
      least = std::min(least, file.entries().size());
      most = std::max(most, file.entries().size());
    }
    EXPECT_EQ(names.size(), size_t{kTensors});
    EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), size_t{kTensors});
    EXPECT_LE(most - least, 1U);
  }
}

}  // namespace
}  // namespace muster::test::any_ranks
