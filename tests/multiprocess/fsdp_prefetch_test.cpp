// FullyShardedDataParallel with gathered parameters: which units are there, or on their way, when an operator begins.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <vector>

#include "multiprocess/fsdp_support.h"
#include "shm/mapping.h"

namespace muster::test {
namespace {

constexpr int kLayers = 6;

// A chain of layers, each a unit. Calls before(layer, in_backward) before the operator that reads the layer's weight.
struct Told : nn::Module {
  nn::ModuleList layers{nn::ModuleList()};
  std::function<void(int layer, bool in_backward)> before = [](int, bool) {};
  Told() {
    for (int i = 0; i < kLayers; ++i) layers->push_back(nn::Linear(nn::LinearOptions(64, 64).bias(false)));
    register_module("layers", layers);
  }
  Tensor forward(const Tensor& input) {
    Tensor x = input;
    for (int i = 0; i < kLayers; ++i) {
      before(i, false);
      x = layers[static_cast<size_t>(i)]->as<nn::Linear>()->forward(x);
      if (x.requires_grad()) x.register_hook([this, i](const Tensor&) -> void { before(i, true); });
      x = torch::relu(x);
    }
    return x;
  }
};

// The units that are there before each layer's operator, of the third step on.
struct Seen {
  std::map<int, std::vector<size_t>> forward, backward;
};
Seen seen_by(World& world, const FsdpOptions& options) {
  const auto net = make<Told>(7, {});
  auto model = fully_shard(net, options);
  EXPECT_EQ(model.unit_names().size(), static_cast<size_t>(kLayers));
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Seen seen;
  net->before = [&](int layer, bool in_backward) {
    (in_backward ? seen.backward : seen.forward)[layer] = model.units_here();
  };
  for (int step = 0; step < 3; ++step) {
    seen = {};
    optimizer.zero_grad();
    model(drawn(world.rank(), step, {2, 64}).requires_grad_()).sum().backward();
    EXPECT_TRUE(model.units_here().empty());
    optimizer.step();
  }
  model.synchronize();
  return seen;
}

// When the operator of a unit begins, the gather of the next one has begun.
TEST(FsdpPrefetch, TheNextUnitIsOnItsWayWhenAnOperatorBegins) {
  for (const HostOfRank& hosts : {kApart, kTwoEach})
    on_hosts(hosts, [](World& world) {
      const Seen seen = seen_by(world, full({.is_unit = is_linear}));
      const auto expect_there = [](const std::vector<size_t>& units, int layer) {
        EXPECT_TRUE(std::find(units.begin(), units.end(), static_cast<size_t>(layer)) != units.end())
            << "unit " << layer << " is not among " << testing::PrintToString(units);
      };
      ASSERT_EQ(seen.forward.size(), static_cast<size_t>(kLayers));
      ASSERT_EQ(seen.backward.size(), static_cast<size_t>(kLayers));
      for (int layer = 0; layer < kLayers; ++layer) {
        SCOPED_TRACE(layer);
        expect_there(seen.forward.at(layer), layer);
        if (layer + 1 < kLayers) expect_there(seen.forward.at(layer), layer + 1);
        expect_there(seen.backward.at(layer), layer);
        if (layer > 0) expect_there(seen.backward.at(layer), layer - 1);
        EXPECT_LE(seen.forward.at(layer).size(), 3u);
        EXPECT_LE(seen.backward.at(layer).size(), 3u);
      }
    });
}

// The ranks of a host have no replicas: together they have one copy of the host's part, and of what is gathered.
TEST(FsdpPrefetch, TheRanksOfAHostShareOnePart) {
  on_hosts(kTwoEach, [](World& world) {
    const auto net = make<Chain>(7, {});
    auto model = fully_shard(net, full({.is_unit = is_linear}));
    const auto host = kTwoEach[static_cast<size_t>(world.rank())] == "a" ? 0 : 1;
    const Group ranks_of_host = world.group().split(host);
    const auto bytes_of_host = [&] {
      Tensor bytes = torch::tensor({static_cast<int64_t>(model.bytes_here())});
      all_reduce(bytes, {.group = ranks_of_host});
      return bytes.item<int64_t>();
    };
    const int64_t unit = 256 * 256 * 4 + static_cast<int64_t>(shm::page_size());
    EXPECT_EQ(bytes_of_host(), unit * Chain::kLayers / 2);
    model.gather();
    EXPECT_EQ(bytes_of_host(), unit * Chain::kLayers);
    model.synchronize();
  });
}

// PyTorch's SHARD_GRAD_OP: what forward() has gathered stays for backward(). Steps are those of DDP to the bit.
TEST(FsdpPrefetch, WithoutReshardingUnitsStayUntilTheEndOfBackward) {
  for (const HostOfRank& hosts : {kApart, kTwoEach})
    on_hosts(hosts, [](World& world) {
      const Seen seen = seen_by(world, full({.is_unit = is_linear, .reshard_after_forward = false}));
      const std::vector<size_t> all = {0, 1, 2, 3, 4, 5};
      for (const auto& [layer, units] : seen.backward) EXPECT_EQ(units, all) << "backward of layer " << layer;

      const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
      DistributedDataParallel ddp(other);
      train(ddp, *other, world);
      auto model = fully_shard(net, full({.unit_cap_mb = 1, .reshard_after_forward = false}));
      train(model, *net, world);
      model.gather();
      expect_equal(*net, *other);
      model.synchronize();
    });
}

}  // namespace
}  // namespace muster::test
