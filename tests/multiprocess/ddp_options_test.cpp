// DistributedDataParallel with sparse gradients, and with tensors that it leaves alone.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "multiprocess/fsdp_support.h"

namespace muster::test {
namespace {

struct WordVectors : nn::Module {
  nn::Embedding words{nullptr};
  nn::EmbeddingBag bag{nullptr};
  nn::Linear out = register_module("out", nn::Linear(6, 4));
  explicit WordVectors(bool sparse = true) {
    words = register_module("words", nn::Embedding(nn::EmbeddingOptions(50, 6).sparse(sparse)));
    bag = register_module("bag", nn::EmbeddingBag(nn::EmbeddingBagOptions(40, 6).sparse(sparse).mode(torch::kSum)));
  }
  Tensor forward(const Tensor& x, bool with_bag = true) {
    Tensor features = words(x).mean(1);
    if (with_bag) features = features + bag(x % 40);
    return out(features);
  }
};

std::shared_ptr<WordVectors> make_words(bool sparse) {
  static std::mutex generator;  // libtorch's default generator is the process's
  const std::lock_guard lock(generator);
  torch::manual_seed(7);
  auto net = std::make_shared<WordVectors>(sparse);
  net->to(torch::kDouble);
  return net;
}

constexpr int64_t kRows = 4;
Tensor ids(int step, int ranks) {
  return (torch::arange(kRows * ranks * 3) * 7 + step * 11).remainder(50).view({kRows * ranks, 3});
}

template <typename Optimizer, typename Options>
void expect_steps_of_one_process(const HostOfRank& hosts, const Options& options, const CommHook& hook = nullptr) {
  on_hosts(hosts, [&](World& world) {
    const auto net = make_words(true), alone = make_words(false);
    DistributedDataParallel<WordVectors> ddp(net, {.bucket_cap_mb = 1e-4, .first_bucket_cap_mb = 1e-4});
    if (hook) ddp.register_comm_hook(hook);
    Optimizer optimizer(net->parameters(), options), of_all(alone->parameters(), options);
    for (int step = 0; step < 5; ++step) {
      const Tensor x = ids(step, world.world_size());
      optimizer.zero_grad();
      of_all.zero_grad();
      ddp.forward(x.narrow(0, world.rank() * kRows, kRows)).square().mean().backward();
      alone->forward(x).square().mean().backward();
      EXPECT_EQ(net->words->weight.grad().layout(), torch::kSparse);
      EXPECT_EQ(net->bag->weight.grad().layout(), torch::kSparse);
      EXPECT_LT(net->words->weight.grad()._nnz(), 50);
      for (const auto& item : net->named_parameters()) {
        const Tensor grad = item.value().grad(), expected = alone->named_parameters()[item.key()].grad();
        EXPECT_TRUE(torch::allclose(grad.is_sparse() ? grad.to_dense() : grad, expected, 1e-12, 1e-14)) << item.key();
      }
      optimizer.step();
      of_all.step();
    }
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(torch::allclose(item.value(), alone->named_parameters()[item.key()], 1e-10, 1e-12)) << item.key();
  });
}

TEST(DdpOptionsTest, SparseGradientsAreThoseOfOneProcess) {
  for (const HostOfRank& hosts : {HostOfRank{"a"}, HostOfRank{"a", "a", "a"}, HostOfRank{"a", "a", "b"}})
    expect_steps_of_one_process<torch::optim::SGD>(hosts, torch::optim::SGDOptions(0.5));
  // A sparse step of Adagrad equals a dense one.
  expect_steps_of_one_process<torch::optim::Adagrad>({"a", "a"}, torch::optim::AdagradOptions(0.1));
  expect_steps_of_one_process<torch::optim::SGD>({"a", "a"}, torch::optim::SGDOptions(0.5), comm_hooks::all_reduce);
}

// What a hook counts as the last bucket is the last that it gets.
TEST(DdpOptionsTest, AHookGetsTheDenseBucketsOnly) {
  on_ranks(2, [](World& world) {
    const auto net = make_words(true);
    DistributedDataParallel<WordVectors> ddp(net, {.bucket_cap_mb = 1e-4, .first_bucket_cap_mb = 1e-4});
    int calls = 0, lasts = 0;
    ddp.register_comm_hook([&](GradBucket& bucket) {
      EXPECT_EQ(bucket.index(), static_cast<size_t>(calls % 2));
      ++calls;
      lasts += bucket.is_last() ? 1 : 0;
      return comm_hooks::all_reduce(bucket);
    });
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      ddp.forward(ids(step + world.rank(), 1)).sum().backward();
      EXPECT_EQ(calls, 2 * (step + 1));
      EXPECT_EQ(lasts, step + 1);
    }
  });
}

TEST(DdpOptionsTest, SparseGradientsThatSomeRanksDoNotHave) {
  on_ranks(2, [](World& world) {
    const auto net = make_words(true), alone = make_words(false);
    DistributedDataParallel<WordVectors> ddp(net, {.find_unused_parameters = true});
    const Tensor x = ids(1, 2), mine = x.narrow(0, world.rank() * kRows, kRows);
    ddp.forward(mine, world.rank() == 0).square().mean().backward();
    (alone->forward(x.narrow(0, 0, kRows)).square().mean() / 2 +
     alone->forward(x.narrow(0, kRows, kRows), false).square().mean() / 2)
        .backward();
    EXPECT_TRUE(torch::allclose(net->bag->weight.grad().to_dense(), alone->bag->weight.grad(), 1e-12, 1e-14));
    // On none: it stays without a gradient.
    net->zero_grad();
    ddp.forward(mine, false).square().mean().backward();
    EXPECT_FALSE(net->bag->weight.grad().defined());
    EXPECT_TRUE(net->words->weight.grad().defined());
    // Accumulation; and a use of the weight that gives a dense gradient.
    net->zero_grad();
    {
      const auto guard = ddp.no_sync();
      ddp.forward(mine).square().mean().backward();
    }
    (ddp.forward(mine).square().mean() + net->words->weight.sum()).backward();
    alone->zero_grad();
    (2 * alone->forward(x).square().mean() + alone->words->weight.sum()).backward();
    EXPECT_TRUE(torch::allclose(net->words->weight.grad().to_dense(), alone->words->weight.grad(), 1e-12, 1e-14));
    EXPECT_TRUE(torch::allclose(net->bag->weight.grad().to_dense(), alone->bag->weight.grad(), 1e-12, 1e-14));
    DistributedDataParallel<WordVectors> strict(make_words(true));
    const std::string what =
        message_of<InvalidArgument>([&] { strict.forward(mine, world.rank() == 0).square().mean().backward(); });
    EXPECT_CONTAINS(what, "on some ranks: bag.weight");
  });
}

// The gradient of `words` is ready when the other branch fails; then the user clears gradients.
TEST(DdpOptionsTest, ASparseGradientOfABackwardThatThrew) {
  on_ranks(2, [](World& world) {
    const auto net = make_words(true), alone = make_words(false);
    DistributedDataParallel<WordVectors> ddp(net);
    const Tensor x = ids(1, 1);
    Tensor bag = net->bag(x % 40);
    if (world.rank() == 0) bag.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("fails"); });
    const Tensor y = net->out(bag + net->words(x).mean(1)).square().mean();
    if (world.rank() == 0)
      EXPECT_THROW(y.backward(), std::runtime_error);
    else
      EXPECT_THROW(y.backward(), InvalidArgument);
    torch::optim::SGD(net->parameters(), 0.1).zero_grad();
    ddp.forward(x).square().mean().backward();
    alone->forward(x).square().mean().backward();
    EXPECT_TRUE(torch::allclose(net->words->weight.grad().to_dense(), alone->words->weight.grad(), 1e-12, 1e-14));
    EXPECT_TRUE(torch::allclose(net->bag->weight.grad().to_dense(), alone->bag->weight.grad(), 1e-12, 1e-14));
  });
}

TEST(DdpOptionsTest, RanksThatDifferInSparsityAreAMismatch) {
  on_ranks(2, [](World& world) {
    const auto net = make_words(world.rank() == 0);
    const std::string what = message_of<Mismatch>([&] { DistributedDataParallel<WordVectors>{net}; });
    EXPECT_CONTAINS(what, world.rank() == 0 ? "another rank's module differs" : "sparse=");
  });
}

TEST(DdpOptionsTest, IgnoredTensorsAreEachRanksOwn) {
  on_ranks(2, [](World& world) {
    struct Net : nn::Module {
      nn::Linear shared = register_module("shared", nn::Linear(3, 3)), own = register_module("own", nn::Linear(3, 3));
      nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(3));
      Tensor forward(const Tensor& x) { return norm(own(shared(x))); }
    };
    const auto make = [&](double value) {
      auto net = std::make_shared<Net>();
      const torch::NoGradGuard no_grad;
      for (Tensor& parameter : net->parameters())
        parameter.copy_(torch::eye(3).view({-1}).narrow(0, 0, 3).mean() + value);
      net->norm->running_mean.fill_(value);
      net->norm->running_var.fill_(value + 1);
      return net;
    };
    const double mine = world.rank() + 1;
    const auto net = make(mine);
    DistributedDataParallel<Net> ddp(net, {.ignored = {"own.weight", "own.bias", "norm.running_mean"}});
    const Tensor expected = make(1)->shared->weight;
    EXPECT_TRUE(torch::equal(net->shared->weight, expected));  // rank 0's
    EXPECT_TRUE(torch::equal(net->own->weight, make(mine)->own->weight));
    EXPECT_EQ(net->norm->running_mean[0].item<double>(), mine);
    EXPECT_EQ(net->norm->running_var[0].item<double>(), 2);
    const Tensor x = torch::sin(torch::arange(12.) * (1 + world.rank())).view({4, 3});
    ddp.forward(x).pow(3).sum().backward();
    const auto local = make(1);
    {
      const torch::NoGradGuard no_grad;
      local->own->weight.copy_(net->own->weight);
      local->own->bias.copy_(net->own->bias);
    }
    local->forward(x).pow(3).sum().backward();
    EXPECT_TRUE(torch::equal(net->own->weight.grad(), local->own->weight.grad()));  // not averaged
    Tensor average = local->shared->weight.grad().clone();
    all_reduce(average, {.op = ReduceOp::AVG});
    EXPECT_TRUE(torch::allclose(net->shared->weight.grad(), average, 1e-3, 1e-4));
    EXPECT_FALSE(torch::allclose(average, local->shared->weight.grad(), 1e-2, 1e-3));
    expect_refusal({"DdpOptions::ignored has own.wait"},
                   [&] { DistributedDataParallel<Net>(make(1), {.ignored = {"own.wait"}}); });
  });
}

// Steps with `change` between them, on this many ranks; the message of the Mismatch of backward(), or none.
struct Divergence {
  int ranks, every;
  std::function<void(WordVectors& net, int rank, int step)> change;
  CommHook hook = nullptr;
};
std::string message_of_divergence(const Divergence& of) {
  std::string first;
  on_ranks(of.ranks, [&](World& world) {
    const auto net = make_words(true);
    DistributedDataParallel<WordVectors> ddp(net, {.check_divergence_every = of.every});
    if (of.hook) ddp.register_comm_hook(of.hook);
    std::string message;
    for (int step = 1; step <= 6 && message.empty(); ++step) {
      net->zero_grad();
      const Tensor loss = ddp.forward(ids(step + world.rank(), 1)).square().mean();
      of.change(*net, world.rank(), step);
      try {
        loss.backward();
      } catch (const Mismatch& mismatch) {
        message = mismatch.what();
      }
    }
    Tensor length = torch::full({1}, static_cast<int64_t>(message.size()));
    broadcast(length, 0);
    EXPECT_EQ(length.item<int64_t>(), static_cast<int64_t>(message.size()));  // all ranks throw, or none
    if (world.rank() == 0) first = message;
  });
  return first;
}

TEST(DdpOptionsTest, RanksThatDivergeAreNamed) {
  EXPECT_EQ(message_of_divergence({3, 1, [](WordVectors&, int, int) {}}), "");
  const auto change_weight = [](WordVectors& net, int rank, int step) {
    if (rank == 2 && step == 2) net.out->weight.data()[1][2] += 1e-9;
  };
  EXPECT_CONTAINS(message_of_divergence({4, 1, change_weight}),
                  "parameter out.weight of rank 2 differs from that of the others after backward() number 2");
  EXPECT_CONTAINS(message_of_divergence({4, 3, change_weight}),
                  "parameter out.weight of rank 2 differs from that of the others after backward() number 3");
  EXPECT_CONTAINS(message_of_divergence({2, 1,
                                         [](WordVectors& net, int rank, int step) {
                                           if (rank == 1 && step == 4) net.bag->weight.data()[39][0] = -0.0;
                                         }}),
                  "parameter bag.weight of rank 1 differs");
  EXPECT_CONTAINS(
      message_of_divergence({2, 2, [](WordVectors&, int, int) {}, comm_hooks::noop}),
      "the gradient of parameter out.weight of rank 1 differs from that of the others after backward() number 2");
  EXPECT_EQ(message_of_divergence({4, 0, change_weight}), "");
}

struct WithBuffers : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(3, 4));
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(4)),
                  other = register_module("other", nn::BatchNorm1d(4));
  nn::InstanceNorm1d each =
      register_module("each", nn::InstanceNorm1d(nn::InstanceNormOptions(4).track_running_stats(true)));
  Tensor mask = register_buffer("mask", torch::ones({4})), own = register_buffer("own", torch::ones({4}));
  Tensor forward(const Tensor& x) { return other(norm(a(x)) * mask * own) + each(a(x).view({1, 4, -1})).view({-1, 4}); }
};

TEST(DdpOptionsTest, BuffersThatNobodyMakesEqual) {
  on_ranks(2, [](World& world) {
    const auto message_of_steps = [&](bool broadcast_buffers,
                                      const std::function<void(WithBuffers&, int rank)>& change) {
      const auto net = std::make_shared<WithBuffers>();
      convert_sync_batchnorm(*net->other);
      DistributedDataParallel<WithBuffers> ddp(
          net, {.broadcast_buffers = broadcast_buffers, .ignored = {"own"}, .check_divergence_every = 1});
      net->own.fill_(world.rank() + 1);
      const auto step = [&] { ddp.forward(torch::rand({4, 3}) + world.rank()).square().sum().backward(); };
      step();  // running statistics differ from now on
      EXPECT_FALSE(torch::equal(net->norm->running_mean, net->other->running_mean));
      change(*net, world.rank());
      try {
        step();
      } catch (const Mismatch& mismatch) {
        return std::string(mismatch.what());
      }
      return std::string();
    };
    const auto change_mask = [](WithBuffers& net, int rank) { net.mask.data()[2] += rank; };
    EXPECT_CONTAINS(message_of_steps(false, change_mask),
                    "buffer mask of rank 1 differs from that of the others after backward() number 2");
    EXPECT_CONTAINS(message_of_steps(false, [](WithBuffers& net, int rank) { net.other->running_var += rank; }),
                    "buffer other.running_var of rank 1 differs");
    EXPECT_EQ(message_of_steps(false, [](WithBuffers&, int) {}), "");
    EXPECT_EQ(message_of_steps(true, change_mask), "");
    // A norm that is synchronized among fewer ranks has other statistics there.
    struct Alone : nn::Module {
      nn::Linear a = register_module("a", nn::Linear(3, 4));
      SyncBatchNorm norm{nullptr};
      explicit Alone(const Group& group) {
        norm = register_module("norm", SyncBatchNorm(nn::BatchNormOptions(4), group));
      }
      Tensor forward(const Tensor& x) { return norm(a(x)); }
    };
    const Group one[] = {world.new_group({0}), world.new_group({1})};
    DistributedDataParallel<Alone> alone(std::make_shared<Alone>(one[world.rank()]),
                                         {.broadcast_buffers = false, .check_divergence_every = 1});
    for (int step = 0; step < 2; ++step) alone.forward(torch::rand({4, 3}) + world.rank()).pow(3).sum().backward();
    EXPECT_FALSE(torch::equal(alone->norm->running_mean, torch::zeros({4})));
    // Ranks that synchronize different norms list as many buffers.
    struct Two : nn::Module {
      nn::Linear a = register_module("a", nn::Linear(3, 4));
      nn::BatchNorm1d first = register_module("first", nn::BatchNorm1d(4)),
                      second = register_module("second", nn::BatchNorm1d(nn::BatchNormOptions(4).affine(false)));
      Tensor forward(const Tensor& x) { return second(first(a(x))); }
    };
    DistributedDataParallel<Two> two(std::make_shared<Two>(),
                                     {.broadcast_buffers = false, .check_divergence_every = 1});
    if (world.rank() == 0) convert_sync_batchnorm(*two->first, one[0]);
    two.forward(torch::rand({4, 3}) + world.rank()).pow(3).sum().backward();
  });
}

TEST(DdpOptionsTest, WithoutInitSyncRanksKeepTheirValues) {
  on_ranks(2, [](World& world) {
    for (const bool init_sync : {true, false}) {
      const auto net = std::make_shared<WithBuffers>();
      const torch::NoGradGuard values_only;
      for (const auto& list : {net->parameters(), net->buffers()})
        for (Tensor tensor : list) tensor.fill_(1 + world.rank());
      DistributedDataParallel<WithBuffers> ddp(net, {.init_sync = init_sync});
      for (const auto& list : {net->parameters(), net->buffers()})
        for (const Tensor& tensor : list)
          EXPECT_TRUE(torch::equal(tensor, torch::full_like(tensor, init_sync ? 1 : 1 + world.rank())));
    }
    EXPECT_THROW(
        DistributedDataParallel<WithBuffers>(std::make_shared<WithBuffers>(), {.init_sync = world.rank() == 0}),
        Mismatch);
  });
}

// A gradient that is delayed belongs to the last bucket, also when buckets have been made anew.
TEST(DdpOptionsTest, DelayedParametersAreAveragedLast) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    DistributedDataParallel<FsdpNet> ddp(
        net, {.bucket_cap_mb = 1e-4, .first_bucket_cap_mb = 1e-4, .delay_all_reduce = {"d.weight", "c.bias"}}),
        usual(other);
    EXPECT_NE(usual.bucket_names().back(), (std::vector<std::string>{"c.bias"}));
    for (int step = 0; step < 3; ++step) {
      const auto names = ddp.bucket_names();
      std::vector<std::string> last;
      for (size_t i = names.size() - 2; i < names.size(); ++i)
        last.insert(last.end(), names[i].begin(), names[i].end());
      EXPECT_EQ(last, (std::vector<std::string>{"d.weight", "c.bias"}));
      net->zero_grad();
      other->zero_grad();
      ddp(fsdp_input(world.rank(), step)).square().sum().backward();
      usual(fsdp_input(world.rank(), step)).square().sum().backward();
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(torch::equal(item.value().grad(), other->named_parameters()[item.key()].grad())) << item.key();
    }
    net->d->weight.set_requires_grad(false);
    expect_refusal({"delay_all_reduce has d.weight"},
                   [&] { DistributedDataParallel<FsdpNet>(net, {.delay_all_reduce = {"d.weight"}}); });
  });
}

TEST(DdpLogging, StepsAndTheirTimes) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    DistributedDataParallel<FsdpNet> ddp(net, {.find_unused_parameters = true});
    const DdpLoggingData first = ddp.logging_data();
    EXPECT_EQ(first.world_size, 2);
    EXPECT_EQ(first.rank, world.rank());
    EXPECT_CONTAINS(first.module_name, "FsdpNet");
    EXPECT_EQ(first.parameters, 8u);
    EXPECT_EQ(std::accumulate(first.bucket_bytes.begin(), first.bucket_bytes.end(), size_t{0}), first.parameter_bytes);
    EXPECT_EQ(first.bucket_bytes.size(), ddp.bucket_names().size());
    EXPECT_FALSE(first.has_rebuilt_buckets || first.has_comm_hook);
    EXPECT_EQ(first.steps, 0);
    EXPECT_EQ(first.average.backward.count(), 0);
    const auto step = [&] {
      const Tensor y = ddp(fsdp_input(world.rank(), 0));
      y.square().sum().backward();
    };
    step();
    {
      const auto guard = ddp.no_sync();
      step();  // is no step
    }
    step();
    // One that is over without a forward() of this DistributedDataParallel has no times.
    net->forward(fsdp_input(world.rank(), 0)).sum().backward();
    ddp.register_comm_hook(comm_hooks::all_reduce);
    const DdpLoggingData data = ddp.logging_data();
    EXPECT_EQ(data.steps, 2);
    EXPECT_TRUE(data.has_rebuilt_buckets && data.has_comm_hook);
    for (const auto& times : {data.last, data.average}) {
      EXPECT_GT(times.forward.count(), 0);
      EXPECT_GT(times.exposed.count(), 0);
      EXPECT_GE(times.communication, times.exposed);
      EXPECT_GE(times.backward, times.communication);
    }
    DistributedDataParallel<FsdpNet> refused(make<FsdpNet>(7, {}));
    refused.register_comm_hook([](GradBucket&) { return HookFuture(torch::zeros({1})); });
    const Tensor loss = refused(fsdp_input(world.rank(), 0)).square().sum();
    EXPECT_THROW(loss.backward(), InvalidArgument);
    EXPECT_EQ(refused.logging_data().steps, 0);
    std::ostringstream words;
    words << data;
    EXPECT_CONTAINS(words.str(), "steps: 2\n");
    EXPECT_CONTAINS(words.str(), "average.exposed: ");
    // Forwards and backwards of shards alternate.
    DistributedDataParallel<FsdpNet> by_shards(make<FsdpNet>(7, {}), {.reproducible = {.shards = 4}});
    for (uint64_t step = 0; step < 2; ++step)
      by_shards.backward_by_shards(step, [&](int shard) { return by_shards(fsdp_input(shard, 0)).square().sum(); });
    EXPECT_EQ(by_shards.logging_data().steps, 0);
  });
}

}  // namespace
}  // namespace muster::test
