// Nets with SyncBatchNorm train on parts of a batch as on the whole batch, under whatever wraps them.
#include "muster/parallel/sync_batch_norm.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include "multiprocess/sync_batch_norm_fixture.h"
#include "muster/optim/autocast.h"
#include "muster/optim/meta.h"

namespace muster::test::batch_norms {
namespace {

const Prepare kInDouble = [](nn::Module& net) { net.to(torch::kDouble); };

Tensor label_of(int rank, int step) { return words(rank, step, {3}, 4); }

// One process with the whole batch.
std::shared_ptr<SmallResNet> trained_on_the_whole_batch(int ranks) {
  const auto net = make<SmallResNet>(7, kInDouble);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    std::vector<Tensor> images, labels;
    for (int rank = 0; rank < ranks; ++rank) {
      images.push_back(image_of(rank, step));
      labels.push_back(label_of(rank, step));
    }
    sgd.zero_grad();
    torch::cross_entropy_loss(net->forward(torch::cat(images)), torch::cat(labels)).backward();
    sgd.step();
  }
  return net;
}

enum class Convert { kBefore, kAfter };

// wrap(net): a DistributedDataParallel or the like.
void expect_training_as_on_the_whole_batch(const HostOfRank& hosts, Convert when,
                                           const std::optional<ActivationCheckpointOptions>& checkpoint,
                                           const auto& wrap) {
  SCOPED_TRACE(testing::PrintToString(hosts));
  at::set_num_threads(1);
  const auto before = copies(make<SmallResNet>(7, kInDouble)->named_parameters());
  const auto alone = trained_on_the_whole_batch(static_cast<int>(hosts.size()));
  on_hosts(hosts, [&](World& world) {
    const auto net = make<SmallResNet>(7 + static_cast<uint64_t>(world.rank()), kInDouble);
    net->checkpoint = checkpoint;
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    if (when == Convert::kBefore) {
      EXPECT_EQ(convert_sync_batchnorm(net), kNorms);
    }
    auto model = wrap(net);
    if (when == Convert::kAfter) {
      EXPECT_EQ(convert_sync_batchnorm(model.module()), kNorms);
    }
    const uint64_t collectives_before = collectives();
    for (int step = 0; step < 3; ++step) {
      sgd.zero_grad();
      torch::cross_entropy_loss(model(image_of(world.rank(), step)), label_of(world.rank(), step)).backward();
      sgd.step();
    }
    const uint64_t again = checkpoint ? kNorms - 1 : 0;
    EXPECT_EQ(collectives() - collectives_before, 3 * (2 * kNorms + again));
    if constexpr (requires { model.gather(); }) model.gather();
    test::expect_close(*net, *alone, before, {.apart = 1e-9});
    const auto buffers = alone->named_buffers();
    for (const auto& item : net->named_buffers()) {
      if (!checkpoint)
        expect_close(item.value().to(torch::kDouble), buffers[item.key()].to(torch::kDouble), 1e-11,
                     item.key().c_str());
      expect_same_bits_on_all_ranks(item.value().reshape({-1}), world);
    }
    barrier();
    if constexpr (requires { model.synchronize(); }) model.synchronize();
  });
}

TEST(SyncBatchNorm, UnderDistributedDataParallel) {
  const auto wrap = [](const auto& net) { return DistributedDataParallel(net); };
  for (const auto when : {Convert::kBefore, Convert::kAfter})
    expect_training_as_on_the_whole_batch({"a", "a", "a"}, when, {}, wrap);
}

TEST(SyncBatchNorm, WithActivationCheckpoints) {
  const auto some = [](std::string_view operation) {
    return operation == "aten::native_batch_norm" || operation == "aten::convolution";
  };
  for (const auto& options : {kNoRandomNumbers,
                              {.preserve_rng_state = false, .early_stop = true},
                              ActivationCheckpointOptions{.preserve_rng_state = false, .keep = some}})
    expect_training_as_on_the_whole_batch({"a", "a"}, Convert::kBefore, options,
                                          [](const auto& net) { return DistributedDataParallel(net); });
}

TEST(SyncBatchNorm, UnderDistributedDataParallelWithGradientsUnderWay) {
  expect_training_as_on_the_whole_batch({"a", "b"}, Convert::kBefore, {}, [](const auto& net) {
    return DistributedDataParallel(net, {.bucket_cap_mb = 1e-6, .first_bucket_cap_mb = 1e-6});
  });
}

TEST(SyncBatchNorm, UnderFullyShardedDataParallel) {
  for (const FsdpOptions& options : {FsdpOptions{}, full({.unit_cap_mb = 1e-6, .max_gathered_units = 2})})
    for (const auto when : {Convert::kBefore, Convert::kAfter})
      expect_training_as_on_the_whole_batch(kTwoEach, when,
                                            when == Convert::kAfter ? std::optional(kNoRandomNumbers) : std::nullopt,
                                            [&](const auto& net) { return fully_shard(net, options); });
}

// Operators get copies of the parameters there, and there are no running statistics by which the module could be known.
TEST(SyncBatchNorm, IsKnownWhenParametersAreReplacedByCopies) {
  struct Net : nn::Module {
    nn::BatchNorm1d norm =
        register_module("norm", nn::BatchNorm1d(nn::BatchNormOptions(kChannels).track_running_stats(false)));
    Tensor forward(const Tensor& x) { return norm(x); }
  };
  on_hosts(kApart, [](World& world) {
    const auto net = make<Net>(7, kInDouble);
    convert_sync_batchnorm(net);
    auto model = fully_shard(net, full({.mixed_precision = {.param_dtype = torch::kFloat}}));
    const Parts parts{{2, 4}};
    const Tensor x = Shape{}.drawn(6, 0, torch::kDouble);
    const Tensor y = model(parts.of(x, world.rank()));
    EXPECT_EQ(y.scalar_type(), torch::kFloat);
    const Tensor expected = (x - x.mean(0)) / (x.var(0, false) + 1e-5).sqrt();
    expect_close(y.to(torch::kDouble), parts.of(expected, world.rank()), 1e-6, "output");
    y.sum().backward();
    model.synchronize();
  });
}

TEST(SyncBatchNorm, StaysInFloat32InMixedPrecision) {
  struct Net : nn::Module {
    nn::Conv2d conv = register_module("conv", nn::Conv2d(3, 8, 3));
    SyncBatchNorm norm = register_module("norm", SyncBatchNorm(8));
    at::ScalarType seen = torch::kLong;
    Tensor forward(const Tensor& x) {
      seen = (norm->weight + 0).scalar_type();
      return norm(conv(x));
    }
  };
  on_hosts(kApart, [](World& world) {
    for (FsdpOptions options : {FsdpOptions{}, full()}) {
      options.mixed_precision = {.param_dtype = torch::kBFloat16};
      auto model = fully_shard(std::make_shared<Net>(), options);
      const Tensor y = model(drawn(0, world.rank(), {2, 3, 6, 6}) + world.rank());
      EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
      EXPECT_EQ(model.module()->seen, torch::kFloat);
      const Tensor mean = y.detach().to(torch::kFloat).mean({0, 2, 3});
      EXPECT_GT(largest(mean), 0.05);  // of this rank's part
      EXPECT_LT(largest(sum_over_ranks(mean)), 0.02);
      y.sum().backward();
      model.synchronize();
    }
  });
}

// New parameters in every step; the running statistics stay.
TEST(SyncBatchNorm, TakesStepsOfMetaSgd) {
  on_ranks(2, [](World& world) {
    struct Net : nn::Module {
      nn::BatchNorm1d first = register_module("first", nn::BatchNorm1d(kChannels));
      SyncBatchNorm second = register_module("second", SyncBatchNorm(kChannels));
      Tensor forward(const Tensor& x) { return second(first(x).tanh()); }
    };
    const auto net = std::make_shared<Net>();  // not by make(), which lets one rank at a time construct
    net->to(torch::kDouble);
    EXPECT_EQ(convert_sync_batchnorm(net), 1u);
    const auto before = net->parameters();
    const Tensor x = Shape{}.drawn(4, world.rank(), torch::kDouble);
    const uint64_t collectives_before = collectives();
    optim::MetaSGD inner(*net, {.lr = 0.1});
    inner.step(net->forward(x).tanh().sum());  // two in forward, one in backward, two in each recomputation
    EXPECT_FALSE(before[0].is_same(net->first->weight));
    const uint64_t after_step = collectives();
    EXPECT_GT(after_step, collectives_before);
    const Tensor loss = net->forward(x).tanh().sum();
    EXPECT_EQ(collectives(), after_step + 2);
    for (const Tensor& each : torch::autograd::grad({loss}, before)) EXPECT_TRUE(each.isfinite().all().item<bool>());
  });
}

TEST(SyncBatchNorm, UnderAutocast) {
  on_ranks(2, [](World& world) {
    const auto net = make<SmallResNet>(7, nullptr), whole = make<SmallResNet>(7, nullptr);
    convert_sync_batchnorm(net);
    const Autocast guard(torch::kBFloat16);
    const auto image = [](int rank) { return image_of(rank, 0).to(torch::kFloat); };
    const Tensor y = net->norm(net->conv(image(world.rank())));
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    const Tensor expected = whole->norm(whole->conv(torch::cat({image(0), image(1)})));
    expect_close(y.to(torch::kFloat), expected.narrow(0, 3 * world.rank(), 3).to(torch::kFloat), 8e-3, "output");
    net->forward(image(world.rank())).sum().backward();
    EXPECT_EQ(net->norm->weight.grad().scalar_type(), torch::kFloat);
  });
}

}  // namespace
}  // namespace muster::test::batch_norms
