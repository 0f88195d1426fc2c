// Modules that are made without memory, and filled when FullyShardedDataParallel is made.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"

namespace muster::test {
namespace {

// Conv, embedding, recurrent layers, attention, layers that are clones; a buffer with values; two names of one
// parameter.
struct Everything : nn::Module {
  nn::Conv2d conv{nn::Conv2dOptions(3, 4, 3)};
  nn::BatchNorm2d norm{4};
  nn::Embedding words{10, 8};
  nn::LSTM lstm{nn::LSTMOptions(8, 8).num_layers(2)};
  nn::TransformerEncoder block{nn::TransformerEncoderOptions(nn::TransformerEncoderLayerOptions(8, 2).dropout(0), 2)};
  Tensor mask = register_buffer("mask", torch::ones({4, 4}).tril());
  Tensor scale = register_buffer("scale", torch::tensor({2.0F, 3.0F}));
  Everything() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("words", words);
    register_module("lstm", lstm);
    register_module("block", block);
    register_parameter("same", words->weight);
  }
  Tensor forward(int rank, int step) {
    const Tensor image = conv(drawn(rank, step, {2, 3, 4, 4}));
    Tensor y = std::get<0>(lstm(words(test::words(rank, step, {4, 2}, 10))));
    y = nn::functional::linear(block(y, mask.eq(0)), words->weight);
    return y.square().mean() + norm(image).square().mean() * scale.sum();
  }
};

void fill(const std::string& name, const Tensor& values, at::Generator random) {
  if (name == "mask")
    values.copy_(torch::ones({4, 4}).tril());
  else if (name.ends_with("num_batches_tracked") || name.ends_with("running_mean") || name.ends_with("bias"))
    values.zero_();
  else if (values.dim() < 2)
    values.fill_(1);
  else
    values.normal_(0, 0.3, random);
}

TEST(OnMeta, MakesModulesWithoutMemory) {
  const auto net = on_meta([] { return std::make_shared<Everything>(); });
  for (const auto& item : net->named_parameters()) EXPECT_TRUE(item.value().is_meta()) << item.key();
  EXPECT_TRUE(net->mask.is_meta());
  EXPECT_TRUE(net->norm->running_mean.is_meta());
  EXPECT_EQ(net->scale.sum().item<float>(), 5);  // torch::tensor() has values
  EXPECT_TRUE(net->named_parameters()["same"].is_same(net->words->weight));
  EXPECT_EQ(net->named_parameters()["block.layers.1.linear1.weight"].sizes(), (std::vector<int64_t>{2048, 8}));
  EXPECT_FALSE(torch::ones({2}).is_meta());  // the guard has ended
  {
    const OnMeta guard;
    EXPECT_TRUE(torch::randn({2}).is_meta());
    EXPECT_FALSE(torch::randn({2}, torch::kCPU).is_meta());
    EXPECT_TRUE(torch::arange(3).is_meta());
    EXPECT_FALSE(torch::ones_like(net->scale).is_meta());
    { const OnMeta inner; }
    EXPECT_TRUE(torch::empty({2}).is_meta());
  }
  // It draws no random numbers.
  torch::manual_seed(3);
  const Tensor expected = torch::randn({4});
  torch::manual_seed(3);
  on_meta([] { return std::make_shared<Everything>(); });
  EXPECT_TRUE(torch::equal(torch::randn({4}), expected));
}

// The same values on any number of ranks and hosts, and those that one process would give them.
TEST(FsdpConstruction, ValuesDoNotDependOnTheRanks) {
  Values expected;
  const std::vector<HostOfRank> all = {{"a"}, {"a", "a", "a"}, {"a", "a", "b"}, {"a", "b"}};
  for (const auto& hosts : all)
    for (const auto strategy : {ShardingStrategy::kHybridShard, ShardingStrategy::kFullShard}) {
      SCOPED_TRACE(testing::PrintToString(hosts));
      on_hosts(hosts, [&](World& world) {
        const auto net = on_meta([] { return std::make_shared<Everything>(); });
        torch::optim::SGD optimizer(net->parameters(), 0.01);
        auto model = fully_shard(net, {.strategy = strategy, .init = fill, .init_seed = 5, .unit_cap_mb = 0.01});
        model.gather();
        if (world.rank() == 0) {
          if (expected.is_empty()) expected = copies(net->named_parameters());
          for (const auto& item : net->named_parameters())
            EXPECT_TRUE(torch::equal(item.value(), expected[item.key()])) << item.key();
          EXPECT_EQ(net->conv->bias.sum().item<float>(), 0);
          EXPECT_GT(net->conv->weight.std().item<float>(), 0.1);
          const auto of_layer = [&](int i) {
            return net->named_parameters()[text("block.layers.", i, ".linear1.weight")];
          };
          EXPECT_FALSE(torch::equal(of_layer(0), of_layer(1)));
          EXPECT_EQ(net->mask.sum().item<float>(), 10);
        }
        // It trains as one that was made with these values.
        const auto other = std::make_shared<Everything>();
        {
          const torch::NoGradGuard no_grad;
          for (const auto& item : other->named_parameters()) item.value().copy_(net->named_parameters()[item.key()]);
        }
        model.synchronize();
        DistributedDataParallel ddp(other);
        torch::optim::SGD sgd(other->parameters(), 0.01);
        for (int step = 0; step < 2; ++step) {
          optimizer.zero_grad();
          sgd.zero_grad();
          model(world.rank(), step).backward();
          ddp(world.rank(), step).backward();
          optimizer.step();
          sgd.step();
        }
        model.gather();
        expect_equal(*net, *other);
        model.synchronize();
      });
    }
}

TEST(FsdpConstruction, OnlyOwnersFill) {
  std::mutex mutex;
  std::multiset<std::string> filled;
  on_hosts({"a", "a", "b", "b"}, [&](World&) {
    const auto net = on_meta([] { return std::make_shared<FsdpNet>(); });
    const auto note = [&](const std::string& name, const Tensor& values, const at::Generator&) {
      const std::lock_guard lock(mutex);
      filled.insert(name);
      values.zero_();
    };
    fully_shard(net, {.strategy = ShardingStrategy::kFullShard, .init = note});
  });
  EXPECT_EQ(filled.size(), 8u);
  EXPECT_EQ(std::set<std::string>(filled.begin(), filled.end()).size(), 8u);
}

TEST(FsdpConstruction, BadUseGetsOneSentence) {
  std::atomic<int> own = 0;
  on_hosts({"a", "a"}, [&](World& world) {
    const auto make_net = [] { return on_meta([] { return std::make_shared<FsdpNet>(); }); };
    expect_refusal({"a.weight has no values", "FsdpOptions::init"}, [&] { fully_shard(make_net()); });
    expect_refusal({"a.weight has no values"}, [&] { DistributedDataParallel<FsdpNet> model(make_net()); });
    // An error of one rank is one of all.
    const auto throws = [](const std::string& name, const Tensor& values, const at::Generator&) {
      if (name == "c.weight") throw std::runtime_error("no such file");
      values.zero_();
    };
    try {
      fully_shard(make_net(), {.init = throws});
      ADD_FAILURE() << "rank " << world.rank() << " has not seen the error";
    } catch (const InvalidArgument& error) {
      EXPECT_CONTAINS(error.what(), "could not fill its tensors");
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "no such file");
      ++own;
    }
    // The next attempt begins anew: nothing has values yet.
    const auto again = make_net();
    EXPECT_ANY_THROW(fully_shard(again, {.init = throws}));
    for (const auto& parameter : again->parameters()) EXPECT_TRUE(parameter.is_meta());
    const auto two = [](const std::string&, const Tensor& values, const at::Generator&) { values.fill_(2); };
    {
      auto model = fully_shard(again, {.init = two});
      EXPECT_EQ(again->b->weight.sum().item<double>(), 2 * 600 * 600);
      model.synchronize();
    }
    // What had values has kept them.
    const auto half = make<FsdpNet>(7, {}), whole = make<FsdpNet>(7, {});
    half->a = half->replace_module("a", on_meta([] { return nn::Linear(12, 600); }));
    const auto fails = [](const std::string&, const Tensor&, const at::Generator&) {
      throw std::runtime_error("no such file");
    };
    EXPECT_ANY_THROW(fully_shard(half, {.init = fails}));
    {
      auto model = fully_shard(half, {.init = two});
      for (const auto& item : whole->named_parameters()) {
        if (item.key()[0] == 'a') continue;
        EXPECT_TRUE(torch::equal(item.value(), half->named_parameters()[item.key()])) << item.key();
      }
      model.synchronize();
    }
    // A buffer, on one rank only.
    const auto with_buffers = on_meta([] { return std::make_shared<Everything>(); });
    const auto fails_once = [&](const std::string& name, const Tensor& values, const at::Generator&) {
      if (name == "mask" && world.rank() == 1) throw std::runtime_error("no such file");
      values.zero_();
    };
    EXPECT_ANY_THROW(fully_shard(with_buffers, {.init = fails_once}));
    EXPECT_TRUE(with_buffers->mask.is_meta());
    {
      const OnMeta guard;
      expect_refusal({"OnMeta guard lives"}, [&] { fully_shard(again, {.init = two}); });
    }
    // On some ranks only.
    const auto net = world.rank() == 0 ? make_net() : make<FsdpNet>(7, {});
    const auto zero = [](const std::string&, const Tensor& values, const at::Generator&) { values.zero_(); };
    const std::string what = message_of<Mismatch>([&] { fully_shard(net, {.init = zero}); });
    EXPECT_CONTAINS(what, world.rank() == 0 ? "another rank's module differs from rank 0's" : "without values");
  });
  EXPECT_EQ(own, 1);
}

// A model of twice the memory that a process may take for itself.
TEST(FsdpConstructionProcess, AModelBeyondTheLimitOfAProcess) {
  constexpr int64_t kFloats = 8 << 20;  // 32 MiB
  struct Large : nn::Module {
    std::vector<Tensor> parts;
    Large() {
      for (int i = 0; i < 8; ++i) parts.push_back(register_parameter(text("p", i), torch::empty({kFloats}), i == 0));
    }
    Tensor forward(int64_t at) {
      Tensor sum = torch::zeros({});
      for (const Tensor& part : parts) sum = sum + part[at];
      return sum;
    }
  };
  for (const HostOfRank& hosts : {HostOfRank{"a", "a"}, HostOfRank{"a", "b"}}) {
    const auto ends = in_processes(hosts, [&](World& world) {
      limit_private_memory(4 * kFloats * sizeof(float));
      EXPECT_ANY_THROW(std::make_shared<Large>());
      const auto net = on_meta([] { return std::make_shared<Large>(); });
      const auto ones = [](const std::string&, const Tensor& values, const at::Generator&) { values.fill_(1); };
      auto model = fully_shard(net, {.strategy = ShardingStrategy::kFullShard, .init = ones, .unit_cap_mb = 1});
      torch::optim::SGD optimizer(net->parameters(), 0.5);
      for (const float expected : {8.0F, 7.75F}) {
        optimizer.zero_grad();
        const Tensor sum = model.forward(world.rank());
        EXPECT_EQ(sum.item<float>(), expected);
        sum.backward();
        optimizer.step();
      }
      barrier();
      return std::string("done");
    });
    for (const auto& end : ends) EXPECT_EQ(end.said, "done");
  }
}

}  // namespace
}  // namespace muster::test
