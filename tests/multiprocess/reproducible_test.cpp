// DdpOptions::reproducible: the parameters after some steps are the same to the bit on 1, 2, 4 and 8 ranks.
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "base/text.h"
#include "multiprocess/reproducible_fixture.h"
#include "muster/data/sampler.h"
#include "muster/optim/optimizers.h"

namespace muster::test {
namespace {

struct Language : nn::Module {
  nn::Embedding table = register_module("table", nn::Embedding(40, 32));
  nn::TransformerEncoder encoder{nullptr};
  nn::LSTM lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(32, 24).num_layers(2).dropout(0.2)));
  nn::Linear out = register_module("out", nn::Linear(24, 40));
  Language() {
    nn::TransformerEncoderLayer layer(nn::TransformerEncoderLayerOptions(32, 4).dim_feedforward(64).dropout(0.1));
    encoder = register_module("encoder", nn::TransformerEncoder(nn::TransformerEncoderOptions(layer, 1)));
  }
  Tensor forward(const Tensor& sample) {
    const Tensor words = (sample.view({1, -1}) * 7 + torch::arange(9).view({-1, 1}) * 3) % 40;
    const Tensor y = out(std::get<0>(lstm(encoder(table(words.slice(0, 0, 8))))));
    return torch::cross_entropy_loss(y.flatten(0, 1), words.slice(0, 1).flatten());
  }
};

// Trains, and returns the hash of the parameters and the losses of all steps.
template <typename Net, typename Optimizer>
std::string trained(World& world, int steps, bool by_shards) {
  torch::manual_seed(5 + world.rank());  // rank 0's parameters count; the rest is not to depend on it
  torch::rand({1 + world.rank()});
  at::set_num_threads(1 + world.world_size() % 2);  // as a launcher that divides cores among ranks
  const auto net = std::make_shared<Net>();
  DistributedDataParallel<Net> ddp(net, {.reproducible = {.shards = kReproducibleShards, .seed = 3}});
  Optimizer optimizer(net->parameters(), 0.01);
  std::map<int, DistributedSampler> samplers;
  for (const int shard : ddp.shards())
    samplers.emplace(shard, DistributedSampler(kReproducibleShards * kRowsOfShard * 6,
                                               {.num_replicas = kReproducibleShards, .rank = shard}));
  std::string losses;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const auto loss_of = [&](int shard) {
      DistributedSampler& sampler = samplers.at(shard);
      if (step % 6 == 0) {
        sampler.set_epoch(static_cast<uint64_t>(step / 6));
        sampler.reset();
      }
      const auto indices = sampler.next(kRowsOfShard).value();
      return ddp->forward(torch::tensor(std::vector<int64_t>(indices.begin(), indices.end())));
    };
    if (by_shards) {
      losses += text(" ", ddp.backward_by_shards(static_cast<uint64_t>(step), loss_of).template item<double>());
    } else {
      Tensor loss = torch::zeros({});
      for (const int shard : ddp.shards()) loss = loss + loss_of(shard) / static_cast<double>(ddp.shards().size());
      ddp.forward(torch::zeros({2}, torch::kLong));  // as a user's forward; its graph is not used
      loss.backward();
    }
    optimizer.step();
  }
  return hash_of(*net) + losses;
}

template <typename Net, typename Optimizer = torch::optim::Adam>
std::string in_ranks(const HostOfRank& hosts, int steps, bool by_shards = true) {
  return same_words(
      in_processes(hosts, [&](World& world) { return trained<Net, Optimizer>(world, steps, by_shards); }));
}

TEST(ReproducibleProcess, OneTwoFourAndEightRanks) {
  const int steps = full_run() ? 200 : 14;
  const std::string alone = in_ranks<Images>({"a"}, steps);
  for (const size_t n : {2, 4, 8}) EXPECT_EQ(in_ranks<Images>(HostOfRank(n, "a"), steps), alone) << n;
  EXPECT_EQ(in_ranks<Images>({"a", "b"}, steps), alone);
  EXPECT_EQ(in_ranks<Images>({"a", "b", "a", "b"}, steps), alone);
  const std::string words = in_ranks<Language, torch::optim::SGD>({"a"}, 5);
  for (const size_t n : {2, 4}) EXPECT_EQ((in_ranks<Language, torch::optim::SGD>(HostOfRank(n, "a"), 5)), words) << n;
}

struct OnlyMatrices : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(nn::LinearOptions(5, 7).bias(false))),
             b = register_module("b", nn::Linear(nn::LinearOptions(7, 3).bias(false)));
  Tensor forward(int shard, uint64_t step) {
    const Tensor x = torch::sin(torch::arange(15.F).view({3, 5}) + 3 * shard + static_cast<double>(step));
    return b(torch::tanh(a(x))).square().mean();
  }
};

TEST(ReproducibleProcess, AnyOptimizer) {
  const auto hashes_on = [](size_t ranks) {
    return same_words(in_processes(HostOfRank(ranks, "a"), [](World&) {
      std::string hashes;
      AllOptimizers::for_each([&]<typename O>(std::type_identity<TorchOptimizer<O>>) {
        torch::manual_seed(3);
        const auto net = std::make_shared<OnlyMatrices>();
        DistributedDataParallel<OnlyMatrices> ddp(net, {.reproducible = {.shards = kReproducibleShards}});
        TorchOptimizer<O> optimizer(net->parameters());
        for (uint64_t step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          ddp.backward_by_shards(step, [&](int shard) { return ddp->forward(shard, step); });
          optimizer.step();
        }
        hashes += hash_of(*net) + " ";
      });
      return hashes;
    }));
  };
  const std::string alone = hashes_on(1);
  EXPECT_GT(std::count(alone.begin(), alone.end(), ' '), 12);
  EXPECT_EQ(hashes_on(4), alone);
}

// So the first test can fail: the usual averages differ in their last bits.
TEST(ReproducibleProcess, TheUsualAveragesAreNot) {
  EXPECT_NE((in_ranks<Language, torch::optim::SGD>({"a"}, 5, false)),
            (in_ranks<Language, torch::optim::SGD>({"a", "a"}, 5, false)));
}

struct Plain : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(4, 3)), b = register_module("b", nn::Linear(4, 3));
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(3));
  Tensor forward(int shard, bool both = true) {
    const Tensor x = torch::sin(torch::arange(20., torch::kDouble).view({5, 4}) + shard);
    return (norm(a(x)) + (both ? torch::tanh(b(x)) : torch::zeros({}, torch::kDouble))).square().mean();
  }
};
std::shared_ptr<Plain> make_plain() {
  auto net = std::make_shared<Plain>();
  net->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  for (Tensor& parameter : net->parameters())
    parameter.copy_(torch::cos(torch::arange(parameter.numel(), torch::kDouble)).view(parameter.sizes()));
  return net;
}

TEST(Reproducible, AveragesOfGradientsBuffersAndLosses) {
  for (const HostOfRank& hosts : {HostOfRank{"a"}, HostOfRank{"a", "a"}, HostOfRank{"a", "b", "b", "a"}})
    on_hosts(hosts, [](World& world) {
      const auto net = make_plain();
      DistributedDataParallel<Plain> ddp(net, {.reproducible = {.shards = 4}});
      const int each = 4 / world.world_size();
      EXPECT_EQ(static_cast<int>(ddp.shards().size()), each);
      EXPECT_EQ(ddp.shards()[0], world.rank() * each);
      const auto step = [&] { return ddp.backward_by_shards(0, [&](int shard) { return ddp->forward(shard); }); };
      const Tensor loss = step();
      double expected = 0;
      Tensor mean = torch::zeros({3}, torch::kDouble);
      const auto alone = make_plain();
      for (int shard = 0; shard < 4; ++shard) {
        alone->norm->reset_running_stats();
        const Tensor part = alone->forward(shard) / 4;
        part.backward();
        expected += part.item<double>();
        mean += alone->norm->running_mean / 4;
      }
      EXPECT_NEAR(loss.item<double>(), expected, 1e-14);
      EXPECT_TRUE(torch::allclose(net->norm->running_mean, mean, 1e-14, 1e-15));
      EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 1);
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(torch::allclose(item.value().grad(), alone->named_parameters()[item.key()].grad(), 1e-12, 1e-14))
            << item.key();
      // Another step adds to the gradients; what is there already is not averaged again.
      step();
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(
            torch::allclose(item.value().grad(), 2 * alone->named_parameters()[item.key()].grad(), 1e-12, 1e-14));
      // And a usual backward() is as always.
      net->zero_grad();
      ddp.forward(0).backward();
      alone->zero_grad();
      alone->forward(0).backward();
      EXPECT_TRUE(torch::allclose(net->a->weight.grad(), alone->a->weight.grad(), 1e-12, 1e-14));
    });
}

TEST(Reproducible, RandomNumbersBelongToStepAndShard) {
  on_ranks(1, [](World&) {
    const auto net = make_plain();
    DistributedDataParallel<Plain> ddp(net, {.reproducible = {.shards = 4, .seed = 1}}),
        other(make_plain(), {.reproducible = {.shards = 4, .seed = 2}});
    const auto drawn_in = [](DistributedDataParallel<Plain>& by, uint64_t step) {
      std::vector<float> all;
      by.backward_by_shards(step, [&](int shard) {
        all.push_back(torch::rand({}).item<float>());
        return by->forward(shard);
      });
      return all;
    };
    torch::manual_seed(9);
    const float before = torch::rand({}).item<float>(), next = torch::rand({}).item<float>();
    torch::manual_seed(9);
    EXPECT_EQ(torch::rand({}).item<float>(), before);
    const auto first = drawn_in(ddp, 0);
    EXPECT_EQ(torch::rand({}).item<float>(), next);  // the default generator goes on where it was
    EXPECT_EQ(drawn_in(ddp, 0), first);
    std::vector<float> all = first;
    for (const auto& more : {drawn_in(ddp, 1), drawn_in(other, 0)}) all.insert(all.end(), more.begin(), more.end());
    std::sort(all.begin(), all.end());
    EXPECT_EQ(std::unique(all.begin(), all.end()), all.end());
  });
}

// A mask as attention has it, the sum of two of which is infinite; and a counter.
TEST(Reproducible, BuffersThatAreNotStatistics) {
  for (const int ranks : {1, 2, 4})
    on_ranks(ranks, [](World&) {
      struct Masked : nn::Module {
        nn::Linear a = register_module("a", nn::Linear(2, 2));
        Tensor mask = register_buffer("mask", torch::full({3}, std::numeric_limits<float>::lowest())),
               last = register_buffer("last", torch::zeros({1}, torch::kLong));
        Tensor forward(int shard) {
          last.fill_(shard + 5);
          return a(torch::ones({1, 2})).square().sum() * (shard + 1);
        }
      };
      const auto net = std::make_shared<Masked>();
      DistributedDataParallel<Masked> ddp(net, {.reproducible = {.shards = 4}});
      ddp.backward_by_shards(0, [&](int shard) { return ddp->forward(shard); });
      EXPECT_EQ(net->mask[1].item<float>(), std::numeric_limits<float>::lowest());
      EXPECT_EQ(net->last.item<int64_t>(), 8);  // as after the last shard
    });
}

TEST(Reproducible, AFunctionThatThrowsOnOneRank) {
  on_ranks(2, [](World& world) {
    const auto net = make_plain(), alone = make_plain();
    DistributedDataParallel<Plain> ddp(net, {.reproducible = {.shards = 2}});
    const auto step = [&](const std::function<void()>& fails) {
      return ddp.backward_by_shards(0, [&](int shard) {
        if (shard == 1) fails();
        return ddp->forward(shard);
      });
    };
    const Tensor before = net->norm->running_mean.clone();
    const auto expect_failure = [&](auto error) {
      const auto failing = [&] { step([&] { throw error; }); };
      if (world.rank() == 1)
        EXPECT_THROW(failing(), decltype(error));
      else
        expect_refusal({"rank 1 could not run the function"}, failing);
      EXPECT_TRUE(torch::equal(net->norm->running_mean, before));
      EXPECT_FALSE(net->a->weight.grad().defined());
    };
    expect_failure(std::runtime_error("a loader that fails"));
    expect_failure(7);  // of no class
    step([] {});
    ((alone->forward(0) / 2).backward(), (alone->forward(1) / 2).backward());
    EXPECT_TRUE(torch::allclose(net->a->weight.grad(), alone->a->weight.grad(), 1e-12, 1e-14));
  });
}

TEST(Reproducible, BadUseIsOneSentence) {
  on_ranks(2, [](World& world) {
    expect_refusal({"does not go with DdpOptions::ignored"}, [] {
      DistributedDataParallel<Plain>(make_plain(), {.ignored = {"a.bias"}, .reproducible = {.shards = 2}});
    });
    EXPECT_THROW(DistributedDataParallel<Plain>(make_plain(), {.reproducible = {.shards = 2 << world.rank()}}),
                 Mismatch);
    {
      DistributedDataParallel<Plain> sums(make_plain(), {.reproducible = {.shards = 2}});
      const auto guard = sums.no_sync();
      sums.forward(0).backward();
      expect_refusal({"a sum of no_sync() that is not averaged yet"},
                     [&] { sums.backward_by_shards(0, [&](int shard) { return sums->forward(shard); }); });
    }
    const auto with = [](int shards) {
      DistributedDataParallel<Plain>(make_plain(), {.reproducible = {.shards = shards}});
    };
    expect_refusal({"reproducible.shards: expected a power of two, got 6"}, [&] { with(6); });
    expect_refusal({"2 ranks cannot share 1 shards"}, [&] { with(1); });
    DistributedDataParallel<Plain> usual(make_plain()), ddp(make_plain(), {.reproducible = {.shards = 2}});
    EXPECT_TRUE(usual.shards().empty());
    expect_refusal({"DdpOptions::reproducible has no shards"},
                   [&] { usual.backward_by_shards(0, [](int) { return Tensor(); }); });
    expect_refusal({"not a loss"}, [&] { ddp.backward_by_shards(0, [](int) { return Tensor(); }); });
    expect_refusal({"called within join()"}, [&] {
      ddp.join([&] { ddp.backward_by_shards(0, [&](int shard) { return ddp->forward(shard); }); });
    });
    expect_refusal({"not a loss"},
                   [&] { ddp.backward_by_shards(0, [](int) { return torch::ones({2}, torch::requires_grad()); }); });
    expect_refusal({"on some shards: b.weight, b.bias"}, [&] {
      ddp.backward_by_shards(0, [&](int shard) { return ddp->forward(shard, world.rank() == 0); });
    });
    EXPECT_TRUE(ddp->b->weight.grad().defined());
    DistributedDataParallel<Plain> four(make_plain(), {.reproducible = {.shards = 4}});
    expect_refusal({"on some shards: b.weight, b.bias"}, [&] {  // also if each rank has a shard that uses them
      four.backward_by_shards(0, [&](int shard) { return four->forward(shard, shard % 2 == 0); });
    });
    expect_refusal({"reproducible.threads: expected 1 or more, got 0"},
                   [] { DistributedDataParallel<Plain>(make_plain(), {.reproducible = {.shards = 2, .threads = 0}}); });
    struct Words : nn::Module {
      nn::Embedding table = register_module("table", nn::Embedding(nn::EmbeddingOptions(5, 2).sparse(true)));
      Tensor forward(const Tensor& x) { return table(x); }
    };
    expect_refusal({"dense gradients only"},
                   [] { DistributedDataParallel<Words>(std::make_shared<Words>(), {.reproducible = {.shards = 2}}); });
  });
  on_ranks(3, [](World&) {
    expect_refusal({"3 ranks cannot share 8 shards"},
                   [] { DistributedDataParallel<Plain>(make_plain(), {.reproducible = {.shards = 8}}); });
  });
}

}  // namespace
}  // namespace muster::test
