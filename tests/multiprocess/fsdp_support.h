// What the tests of FullyShardedDataParallel share.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/world/world_starter.h"
#include "muster/muster.h"
#include "parallel/kit/shared_tensor.h"
#include "support/forked.h"
#include "support/models.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {

// Parameters of a megabyte and more, and small ones.
struct FsdpNet : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(12, 600)), b = register_module("b", nn::Linear(600, 600)),
             c = register_module("c", nn::Linear(600, 600)), d = register_module("d", nn::Linear(600, 5));
  Tensor forward(const Tensor& x) { return d(torch::relu(c(torch::relu(b(torch::relu(a(x))))))); }
};

inline Tensor fsdp_input(int rank, int step) { return drawn(rank, step, {4, 12}); }

using HostOfRank = std::vector<std::string>;  // as comm::WorldStarter's
inline const HostOfRank kApart{"a", "b"};

// Ranks of a host, and the hosts, may come in any order and number.
inline const std::vector<HostOfRank> kPlacements = {
    {"a", "b"}, {"a", "a", "b", "b"}, {"a", "b", "a", "b"}, {"a", "a", "b"}, {"a", "b", "b", "b", "c", "a"}};

// Three steps, which end with the barrier that FullyShardedDataParallel needs before parameters are read.
template <typename Model>
void train(Model& model, FsdpNet& net, const World& world) {
  torch::optim::AdamW optimizer(net.parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model(fsdp_input(world.rank(), step)).square().sum().backward();
    optimizer.step();
  }
  barrier();
}

// Which rank owns a parameter shows in its memory and in its gradient.
template <typename Model>
void expect_owners_alone_have_gradients(const Model& model, const World& world) {
  for (const auto& parameter : model.module()->parameters()) {
    const bool mine = model.owner(parameter) == world.rank();
    EXPECT_EQ(parameter.grad().defined(), mine);
    EXPECT_EQ(parallel::belongs_to_another_rank(parameter), !mine);
  }
}

// Clips both; the second norm is that of clipped gradients.
template <typename Model>
void expect_same_norms(Model& model, const FsdpNet& other) {
  for (const double most : {1e9, 1e-3})
    for (const double type : {2.0, HUGE_VAL}) {
      const double norm = nn::utils::clip_grad_norm_(other.parameters(), most, type);
      EXPECT_GT(norm, 0);
      EXPECT_NEAR(model.clip_grad_norm_(most, type), norm, 1e-4 * norm);
    }
}

inline FsdpOptions full(FsdpOptions options = {.unit_cap_mb = 1}) {
  options.strategy = ShardingStrategy::kFullShard;
  return options;
}
inline const HostOfRank kTwoEach{"a", "b", "b", "a"};

// A FullyShardedDataParallel with kFullShard, for templates of tests that are not only about it. Over several hosts its
// parameters are gathered.
template <typename Net>
struct FullyGathered : FullyShardedDataParallel<Net> {
  FullyGathered(const std::shared_ptr<Net>& net, FsdpOptions options)
      : FullyShardedDataParallel<Net>(net, full(with_small_units(std::move(options)))) {}
  static FsdpOptions with_small_units(FsdpOptions options) {
    options.unit_cap_mb = 0.5;
    return options;
  }
};

// For activation_checkpoint(), which would set back the generator from which other ranks of the process draw meanwhile.
inline const ActivationCheckpointOptions kNoRandomNumbers{.preserve_rng_state = false};

inline bool is_linear(const nn::Module& module) { return dynamic_cast<const nn::LinearImpl*>(&module) != nullptr; }

// A chain of equal layers, with a function that is called at each.
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

// Ranks that are threads. Each sets the number of its own: until then its first products use as many as there are
// cores, and round differently.
inline void on_hosts(const HostOfRank& hosts, const std::function<void(World&)>& fn) {
  at::set_num_threads(1);
  const auto rank = [&](World& world) {
    at::set_num_threads(1);
    fn(world);
  };
  comm::WorldStarter(hosts).run_threads(static_cast<int>(hosts.size()), rank, {.timeout = kPatience});
}
inline void on_ranks(int n, const std::function<void(World&)>& fn) {
  on_hosts(HostOfRank(static_cast<size_t>(n), "host"), fn);
}

// Ranks that are processes. Returns how each ended. faults_of: the faults that are injected in a rank.
inline std::vector<ForkedRanks::End> in_processes(
    const HostOfRank& hosts, const std::function<std::string(World&)>& fn,
    const std::function<FaultPlan(int rank)>& faults_of = [](int) { return FaultPlan{}; }) {
  const ForkedJob job;
  ForkedRanks ranks(static_cast<int>(hosts.size()), [&](int rank) {
    at::set_num_threads(1);
    const WorldOptions options{.timeout = kPatience, .faults = faults_of(rank)};
    World world = job.join(rank, static_cast<int>(hosts.size()), options, hosts);
    const World::Scope scope(world);
    return fn(world);
  });
  return ranks.wait_all(Deadline::after(kPatience));
}

inline void expect_refusal(const std::vector<std::string>& parts, const std::function<void()>& fn) {
  const std::string what = message_of<InvalidArgument>(fn);
  for (const auto& part : parts) EXPECT_CONTAINS(what, part);
}

inline void expect_equal(const nn::Module& got, const nn::Module& expected) {
  const auto values = expected.named_parameters();
  for (const auto& item : got.named_parameters())
    EXPECT_TRUE(torch::equal(item.value(), values[item.key()])) << item.key();
}

}  // namespace muster::test
