// activation_checkpoint() where results of operators are kept on request.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/optim/autocast.h"
#include "support/ranks.h"
#include "unit/activation_checkpoint_fixture.h"

namespace muster::test::activation_checkpoints {
namespace {

// An operator that counts how often it is computed.
int computed = 0;
Tensor counted_kernel(const Tensor& x) {
  ++computed;
  return x * 2;
}
Tensor counted(const Tensor& x) {
  static const torch::Library library = [] {
    torch::Library fragment(torch::Library::DEF, "muster_test", std::nullopt, __FILE__, __LINE__);
    fragment.def("counted(Tensor x) -> Tensor");
    fragment.impl("counted", c10::DispatchKey::CPU, TORCH_FN(counted_kernel));
    return fragment;
  }();
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("muster_test::counted", "")
      .typed<Tensor(const Tensor&)>()
      .call(x);
}

TEST_F(ActivationCheckpoint, KeepsResultsOnRequest) {
  const auto net = std::make_shared<Blocks>();
  const Tensor weight = values(3, {Blocks::kWidth});
  std::vector<std::string> asked;
  const auto gradients_with = [&](const std::vector<std::string>& kept, int nested) {
    computed = 0;
    asked.clear();
    net->zero_grad();
    ActivationCheckpointOptions options{.keep = [&](std::string_view operation) {
      asked.emplace_back(operation);
      return std::find(kept.begin(), kept.end(), operation) != kept.end();
    }};
    const auto run = [&](const Tensor& y) { return net->forward(y * counted(weight), nested > 1) * counted(weight); };
    Tensor x = values(1, {5, Blocks::kWidth}).set_requires_grad(true);
    torch::manual_seed(2);
    const Tensor y = nested > 0 ? activation_checkpoint(options, run, x) : run(x);
    y.square().sum().backward();
    std::vector<Tensor> all = {y, x.grad()};
    for (const auto& parameter : net->parameters()) all.push_back(parameter.grad().clone());
    return all;
  };
  const auto expected = gradients_with({}, 0);
  const auto expect_same = [&](const std::vector<Tensor>& all, int times) {
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::equal(all[i], expected[i])) << i;
    EXPECT_EQ(computed, times);
  };
  for (const int nested : {1, 2}) {
    SCOPED_TRACE(nested);
    expect_same(gradients_with({}, nested), 4);
    expect_same(gradients_with({"muster_test::counted"}, nested), 2);
    expect_same(
        gradients_with({"muster_test::counted", "aten::addmm", "aten::native_layer_norm", "aten::_softmax"}, nested),
        2);
    for (const char* const operation : {"aten::addmm", "aten::gelu", "aten::native_layer_norm"})
      EXPECT_NE(std::find(asked.begin(), asked.end(), operation), asked.end()) << operation;
    for (const char* const operation : {"aten::t", "aten::bernoulli_", "aten::native_dropout"})  // a view, random ones
      EXPECT_EQ(std::find(asked.begin(), asked.end(), operation), asked.end()) << operation;
  }
}

TEST_F(ActivationCheckpoint, KeptResultsEndWithTheGraphAndMustNotChange) {
  const ActivationCheckpointOptions keeps_sin{
      .keep = [](std::string_view operation) { return operation == "aten::sin"; }};
  c10::weak_intrusive_ptr<c10::StorageImpl> kept = c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim(nullptr);
  const auto fn = [&](const Tensor& x) {
    const Tensor y = torch::sin(x);
    kept = y.storage().getWeakStorageImpl();
    return torch::cos(y) * y.exp();
  };
  Tensor x = values(1, {1000}).set_requires_grad(true);
  {
    const Tensor y = activation_checkpoint(keeps_sin, fn, x);
    EXPECT_FALSE(kept.expired());
    y.sum().backward({}, /*retain_graph=*/true);
    y.sum().backward();  // again
    Tensor same = x.detach().clone().set_requires_grad(true);
    (fn(same).sum() * 2).backward();
    EXPECT_TRUE(torch::equal(x.grad(), same.grad()));
  }
  {
    const Tensor y = activation_checkpoint(keeps_sin, fn, x);
    EXPECT_FALSE(kept.expired());
  }
  EXPECT_TRUE(kept.expired());
  // Inside of a call that keeps nothing, nothing is kept.
  const Tensor outer =
      activation_checkpoint([&](const Tensor& at) { return activation_checkpoint(keeps_sin, fn, at) + 1; }, x);
  EXPECT_TRUE(kept.expired());
  outer.sum().backward();

  const Tensor other = activation_checkpoint(
      keeps_sin,
      [calls = std::make_shared<int>(0)](const Tensor& at) {
        return (++*calls == 1 ? torch::sin(at) : torch::tanh(at)).exp();
      },
      x);
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { other.sum().backward(); }), "all results that were kept");
}

// Linear over three dimensions adds its bias in place, to memory that has another version counter.
TEST_F(ActivationCheckpoint, KeptResultsThatAreChangedInPlace) {
  nn::Linear linear(nn::LinearOptions(6, 6));
  const auto keep = [](std::string_view operation) { return operation == "aten::mm" || operation == "aten::bmm"; };
  const auto expect_same = [&](const std::function<Tensor(const Tensor&, bool)>& run) {
    std::vector<Tensor> results[2];
    for (const bool kept : {false, true}) {
      linear->zero_grad();
      Tensor x = values(1, {2, 5, 6}).set_requires_grad(true);
      const Tensor y = run(x, kept), before = y.detach().clone();
      for (int time = 0; time < 2; ++time) y.square().sum().backward({}, /*retain_graph=*/true);
      EXPECT_TRUE(torch::equal(y, before));
      results[kept] = {before, x.grad(), linear->weight.grad().clone(), linear->bias.grad().clone()};
    }
    for (size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(torch::equal(results[0][i], results[1][i])) << i;
  };
  const auto twice = [&](const Tensor& at) { return torch::gelu(linear(torch::gelu(linear(at)))); };
  expect_same(
      [&](const Tensor& x, bool kept) { return kept ? activation_checkpoint({.keep = keep}, twice, x) : twice(x); });
  const auto masked = [&](const Tensor& at) {
    return torch::bmm(at, linear(at).transpose(1, 2))
        .div_(3)
        .masked_fill_(at.new_ones({5, 5}).triu(1).to(torch::kBool), 0);
  };
  expect_same(
      [&](const Tensor& x, bool kept) { return kept ? activation_checkpoint({.keep = keep}, masked, x) : masked(x); });
  // By the caller, after the call.
  expect_same([&](const Tensor& x, bool kept) {
    Tensor y = kept ? activation_checkpoint({.keep = keep}, linear, x) : linear(x);
    y.relu_();
    return y;
  });
  const auto by_hand = [&](const Tensor& at) { return at.matmul(linear->weight.t()); };
  expect_same([&](const Tensor& x, bool kept) {
    Tensor y = kept ? activation_checkpoint({.keep = keep}, by_hand, x) : by_hand(x);
    y += linear->bias;
    return torch::tanh(y);
  });
}

TEST_F(ActivationCheckpoint, KeepsAttentionAndGoesWithAutocast) {
  std::vector<std::string> asked;
  const auto attention = [](const Tensor& x) { return at::scaled_dot_product_attention(x, x, x); };
  Tensor x = values(1, {2, 3, 8, 16}).set_requires_grad(true);
  const auto note = [&](std::string_view operation) {
    asked.emplace_back(operation);
    return true;
  };
  const Tensor y = activation_checkpoint({.keep = note}, attention, x);
  EXPECT_NE(std::find(asked.begin(), asked.end(), "aten::_scaled_dot_product_flash_attention_for_cpu"), asked.end());
  y.square().sum().backward();
  Tensor same = x.detach().clone().set_requires_grad(true);
  attention(same).square().sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), same.grad()));

  // In one call, the converted weight comes from autocast's cache; in the other, it does not.
  nn::Linear linear(nn::LinearOptions(16, 16).bias(false));
  int products = 0;
  const auto every_other = [&](std::string_view operation) { return operation == "aten::mm" && products++ % 2 == 0; };
  const auto thrice = [&](const Tensor& at) { return linear(torch::tanh(linear(torch::tanh(linear(at))))); };
  std::vector<Tensor> gradients;
  for (const bool kept : {false, true}) {
    linear->zero_grad();
    {
      const Autocast autocast;
      const Tensor z = values(2, {5, 16});
      (kept ? activation_checkpoint({.keep = every_other}, thrice, z) : thrice(z)).sum().backward();
    }
    gradients.push_back(linear->weight.grad().clone());
  }
  EXPECT_TRUE(torch::equal(gradients[0], gradients[1]));
}

}  // namespace
}  // namespace muster::test::activation_checkpoints
