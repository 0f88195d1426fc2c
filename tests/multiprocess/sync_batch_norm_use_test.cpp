// What SyncBatchNorm synchronizes and what it does not, what a conversion keeps, and how bad use is refused.
#include "muster/parallel/sync_batch_norm.h"

#include <c10/core/InferenceMode.h>
#include <torch/serialize.h>

#include <sstream>
#include <string>

#include "multiprocess/sync_batch_norm_fixture.h"

namespace muster::test::batch_norms {
namespace {

TEST(SyncBatchNorm, EvaluationAndOtherModulesAreLocal) {
  on_ranks(2, [](World& world) {
    auto converted = with_values(nn::BatchNorm1d(kChannels), torch::kFloat);
    auto module = with_values(SyncBatchNorm(kChannels), torch::kFloat);
    auto other = with_values(nn::BatchNorm1d(kChannels), torch::kFloat);
    convert_sync_batchnorm(converted);
    const auto copy = std::dynamic_pointer_cast<nn::BatchNorm1dImpl>(converted->clone());
    const Tensor x = Shape{}.drawn(4 + world.rank(), world.rank(), torch::kFloat).requires_grad_();
    const uint64_t before = collectives();
    EXPECT_TRUE(torch::equal(copy->forward(x), other(x)));
    converted->eval();
    module->eval();
    other->eval();
    other->reset_running_stats();
    EXPECT_TRUE(torch::equal(converted(x), other(x)));
    EXPECT_TRUE(torch::equal(module(x), other(x)));
    converted(x).sum().backward();
    EXPECT_EQ(collectives(), before);
    // Without gradients; and a clone of the module.
    converted->train();
    module->train();
    {
      const torch::NoGradGuard no_grad;
      converted(x);
    }
    {
      const c10::InferenceMode inference;
      converted(x.detach() * 1);
      std::dynamic_pointer_cast<SyncBatchNormImpl>(module->clone())->forward(x.detach() * 1);
    }
    EXPECT_EQ(collectives(), before + 3);
  });
}

TEST(SyncBatchNorm, OnlyWhatNeedsAGradientHasACollectiveInBackward) {
  on_ranks(2, [](World& world) {
    auto norm = with_values(nn::BatchNorm1d(kChannels), torch::kDouble);
    auto whole = with_values(nn::BatchNorm1d(kChannels), torch::kDouble);
    convert_sync_batchnorm(norm);
    const Parts parts{{2, 3}};
    const Tensor x = Shape{}.drawn(5, 0, torch::kDouble), own = parts.of(x, world.rank());
    uint64_t before = collectives();
    norm(own).square().sum().backward();
    whole(x).square().sum().backward();
    EXPECT_EQ(collectives(), before + 1);
    expect_close(sum_over_ranks(norm->weight.grad()), whole->weight.grad(), 1e-12, "weight");
    // With frozen parameters.
    for (auto each : {norm, whole})
      for (auto& parameter : each->parameters()) parameter.set_requires_grad(false);
    before = collectives();
    const Tensor of = own.clone().requires_grad_(), all = x.clone().requires_grad_();
    norm(of).pow(3).sum().backward();
    whole(all).pow(3).sum().backward();
    EXPECT_EQ(collectives(), before + 2);
    expect_close(of.grad(), parts.of(all.grad(), world.rank()), 1e-12, "input");
  });
}

TEST(SyncBatchNorm, KeepsObjectsThroughConversionsOfDtypeAndFiles) {
  on_ranks(2, [](World& world) {
    const auto net = make<SmallResNet>(7, nullptr);
    const auto names = [&] {
      std::vector<std::string> all;
      for (const auto& item : net->named_buffers()) all.push_back(item.key());
      for (const auto& item : net->named_parameters()) all.push_back(item.key());
      return all;
    };
    const auto names_before = names();
    const Tensor weight = net->norm->weight;
    const auto* const module = net->norm.get();
    EXPECT_EQ(convert_sync_batchnorm(net), kNorms);
    EXPECT_EQ(convert_sync_batchnorm(*net), kNorms);  // again
    EXPECT_EQ(names(), names_before);
    EXPECT_TRUE(weight.is_same(net->norm->weight));
    EXPECT_EQ(module, net->norm.get());
    std::stringstream file;
    torch::save(net, file);
    torch::load(net, file);
    net->to(torch::kDouble);
    net->to(torch::kDouble);  // to itself
    for (auto& parameter : net->parameters()) parameter.set_data(parameter.detach().clone());
    const uint64_t before = collectives();
    net->forward(image_of(world.rank(), 0)).sum().backward();
    EXPECT_EQ(collectives(), before + 2 * kNorms);
    // The module's file is that of a BatchNorm.
    auto saved = with_values(SyncBatchNorm(kChannels), torch::kFloat);
    saved(Shape{}.drawn(3, 0, torch::kFloat));
    std::stringstream other;
    torch::save(saved, other);
    auto loaded = with_values(nn::BatchNorm2d(kChannels), torch::kFloat);
    torch::load(loaded, other);
    for (const auto& item : saved->named_buffers())
      EXPECT_TRUE(torch::equal(item.value(), loaded->named_buffers()[item.key()])) << item.key();
    EXPECT_TRUE(torch::equal(saved->weight, loaded->weight));
  });
}

TEST(SyncBatchNorm, AllBatchesEmpty) {
  on_ranks(2, [](World&) {
    auto norm = with_values(nn::BatchNorm2d(kChannels), torch::kFloat);
    convert_sync_batchnorm(norm);
    const Tensor x = Shape{{2, 2}}.drawn(0, 0, torch::kFloat).requires_grad_();
    const Tensor y = norm(x);
    EXPECT_EQ(y.sizes(), x.sizes());
    y.sum().backward();
    EXPECT_EQ(x.grad().sizes(), x.sizes());
    EXPECT_TRUE(torch::equal(norm->running_mean, torch::zeros({kChannels})));
  });
}

TEST(SyncBatchNorm, OneValuePerChannelInAll) {
  on_ranks(3, [](World& world) {
    auto module = with_values(SyncBatchNorm(kChannels), torch::kFloat);
    const Shape shape;
    EXPECT_CONTAINS(message_of<c10::Error>([&] { module(shape.drawn(world.rank() == 1 ? 1 : 0, 0, torch::kFloat)); }),
                    "Expected more than 1 value per channel when training");
    // One on each rank is enough.
    const Tensor x = shape.drawn(3, 0, torch::kDouble);
    module->to(torch::kDouble);
    const Tensor y = module(x.narrow(0, world.rank(), 1));
    const Tensor expected = with_values(nn::BatchNorm1d(kChannels), torch::kDouble)(x);
    expect_close(y, expected.narrow(0, world.rank(), 1), 1e-12, "output");
  });
}

TEST(SyncBatchNorm, Groups) {
  on_ranks(3, [](World& world) {
    const Group pair = world.new_group({2, 0}), other = world.new_group({0, 1, 2});
    auto norm = with_values(nn::BatchNorm1d(kChannels), torch::kDouble);
    if (world.rank() == 1) {
      EXPECT_CONTAINS(message_of<InvalidArgument>([&] { convert_sync_batchnorm(norm, pair); }), "not a member");
      EXPECT_CONTAINS(message_of<InvalidArgument>([&] { SyncBatchNorm(kChannels, pair); }), "not a member");
    } else {
      EXPECT_EQ(convert_sync_batchnorm(norm, pair), 1u);
      const Tensor x = Shape{}.drawn(5, 0, torch::kDouble);
      const Tensor expected = with_values(nn::BatchNorm1d(kChannels), torch::kDouble)(x);
      const Parts parts{{3, 2}};
      expect_close(norm(parts.of(x, pair.rank())), parts.of(expected, pair.rank()), 1e-12, "output");
      EXPECT_EQ(collectives(), 0u);
      expect_refusal({"the net itself is synchronized in another group already", "clone()"},
                     [&] { convert_sync_batchnorm(norm, other); });
    }
    nn::Sequential nothing(nn::Linear(2, 2));
    EXPECT_EQ(convert_sync_batchnorm(nothing), 0u);
  });
}

TEST(SyncBatchNorm, BadUse) {
  std::shared_ptr<SmallResNet> left;
  SyncBatchNorm left_module{nullptr};
  on_ranks(2, [&](World& world) {
    auto norm = with_values(nn::BatchNorm2d(kChannels), torch::kFloat);
    auto module = with_values(SyncBatchNorm(kChannels), torch::kFloat);
    convert_sync_batchnorm(norm);
    expect_refusal({"expected 5 channels, as weight has, got 3 in size [2, 3, 4, 4]"}, [&] {
      norm(torch::ones({2, 3, 4, 4}));
    });
    expect_refusal({"5 channels", "got 3 in size [2, 3]"}, [&] { module(torch::ones({2, 3})); });
    expect_refusal({"size [5]", "two dimensions or more"}, [&] { module(torch::ones({5})); });
    expect_refusal({"Long"}, [&] { module(torch::ones({2, 5}, torch::kLong)); });
    expect_refusal({"weight", "is Float", "input is Double"}, [&] { module(torch::ones({2, 5}, torch::kDouble)); });
    EXPECT_THROW(norm(torch::ones({2, 5})), c10::Error);  // as an ordinary BatchNorm2d
    expect_refusal({"input", "device meta"}, [&] { module(torch::ones({2, 5, 3}, torch::kMeta)); });
    auto without_values = on_meta([&] { return nn::BatchNorm2d(kChannels); });
    convert_sync_batchnorm(without_values);
    expect_refusal({"weight", "device meta"}, [&] { without_values(torch::ones({2, 5, 3, 3})); });

    nn::Sequential net(nn::Linear(2, 3), nn::BatchNorm1d(nn::BatchNormOptions(3).eps(world.rank() == 0 ? 1e-5 : 1e-3)));
    const std::string what = message_of<Mismatch>([&] { convert_sync_batchnorm(net); });
    if (world.rank() == 1) {
      EXPECT_CONTAINS(what, "eps 0.001");
    }
    EXPECT_CONTAINS(message_of<Mismatch>([&] { convert_sync_batchnorm(nn::BatchNorm1d(3 + world.rank())); }),
                    "differs");
    const auto different = make<SmallResNet>(7, nullptr);
    convert_sync_batchnorm(different);
    if (world.rank() == 0) {
      left = different;
      left_module = module;
    }
  });
  // The World has ended.
  const Tensor x = image_of(0, 0).to(torch::kFloat);
  EXPECT_CONTAINS(message_of<Aborted>([&] { left->forward(x); }), "convert_sync_batchnorm() in the new World");
  EXPECT_THROW(left_module(torch::ones({2, 5})), Aborted);
  left->eval();
  EXPECT_TRUE(left->forward(x).isfinite().all().item<bool>());
  EXPECT_CONTAINS(message_of<Aborted>([&] { convert_sync_batchnorm(left); }), "World");
  run_threads(1, [&](World&) {
    left->train();
    convert_sync_batchnorm(left);
    EXPECT_TRUE(left->forward(x).isfinite().all().item<bool>());
  });
}

}  // namespace
}  // namespace muster::test::batch_norms
