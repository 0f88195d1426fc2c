// activation_checkpoint() with `reentrant`, which runs backward() inside of backward(). What it does to data-parallel
// training is in multiprocess/ddp_reentrant_test.cpp.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "unit/activation_checkpoint_fixture.h"

namespace muster::test::activation_checkpoints {
namespace {

const ActivationCheckpointOptions kReentrant{.reentrant = true};

using Function = std::function<Tensor(const Tensor&)>;

template <typename Run>
void expect_invalid(const std::string& message, const Run& run) {
  try {
    run();
    ADD_FAILURE() << "nothing was thrown; expected: " << message;
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
  }
}

class ReentrantCheckpoint : public ActivationCheckpoint {};

TEST_F(ReentrantCheckpoint, GivesTheBitsOfAnOrdinaryCall) {
  const auto net = std::make_shared<Blocks>();
  std::vector<Tensor> results[2];
  for (const bool checkpointed : {false, true}) {
    net->zero_grad();
    const Tensor x = values(1, {5, Blocks::kWidth}).set_requires_grad(true);
    torch::manual_seed(2);
    Tensor y = x;
    for (const auto& layer : *net->layers) {
      const auto run = [&layer](const Tensor& z) { return layer->as<Blocks::Block>()->forward(z); };
      y = checkpointed ? activation_checkpoint(kReentrant, run, y) : run(y);
    }
    (y * y).sum().backward();
    auto& all = results[checkpointed];
    all = {y, x.grad(), torch::rand({3})};  // the generator goes on as if there had been no second call
    for (const auto& parameter : net->parameters()) all.push_back(parameter.grad().clone());
  }
  for (size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(torch::equal(results[0][i], results[1][i])) << i;
}

TEST_F(ReentrantCheckpoint, KeepsOnlyTheArguments) {
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> inside;
  int calls = 0;
  const Function fn = [&](const Tensor& x) {
    ++calls;
    const Tensor y = torch::sin(x);
    inside.emplace_back(y.getIntrusivePtr());
    return torch::exp(y);
  };
  const Tensor x = values(1, {10}).set_requires_grad(true);
  Tensor y = activation_checkpoint(kReentrant, fn, x);
  EXPECT_TRUE(inside.at(0).expired());
  const c10::weak_intrusive_ptr<c10::TensorImpl> result(y.getIntrusivePtr());
  for (int i = 0; i < 2; ++i) {  // each backward() calls it again
    x.mutable_grad() = Tensor();
    y.sum().backward({}, /*retain_graph=*/true);
    EXPECT_EQ(calls, 2 + i);
    const Tensor same = x.detach().clone().set_requires_grad(true);
    torch::exp(torch::sin(same)).sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), same.grad()));
  }
  y = Tensor();
  EXPECT_TRUE(result.expired()) << "its own node keeps the result";
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(activation_checkpoint(kReentrant, fn, x).requires_grad());
}

TEST_F(ReentrantCheckpoint, Nests) {
  const Function plain = [](const Tensor& x) { return torch::sin(torch::exp(x)); };
  for (const bool inner_too : {false, true})
    for (const bool outer_too : {false, true}) {
      const Function inner = [&](const Tensor& x) {
        return activation_checkpoint({.reentrant = inner_too}, plain, torch::tanh(x));
      };
      const Tensor x = values(1, {6}).set_requires_grad(true), same = x.detach().clone().set_requires_grad(true);
      activation_checkpoint({.reentrant = outer_too}, inner, torch::cos(x)).sum().backward();
      plain(torch::tanh(torch::cos(same))).sum().backward();
      EXPECT_TRUE(torch::equal(x.grad(), same.grad())) << inner_too << outer_too;
    }
}

TEST_F(ReentrantCheckpoint, SeveralArgumentsAndResults) {
  const Tensor a = values(1, {4}).set_requires_grad(true), b = values(2, {4}),
               c = values(3, {4}).set_requires_grad(true);
  const auto fn = [](const Tensor& p, int power, Tensor q, const Tensor& nothing, const Tensor& r) {
    EXPECT_FALSE(nothing.defined());
    // A result without a gradient, one that is undefined, and one that backward() does not come to.
    return std::make_tuple(torch::sin(p * q).pow(power), std::vector<Tensor>{torch::cos(r * p), p + r},
                           torch::argmax(q), Tensor());
  };
  const auto loss = [](const auto& all) {
    EXPECT_FALSE(std::get<3>(all).defined());
    EXPECT_FALSE(std::get<2>(all).requires_grad());
    return std::get<0>(all).sum() + 2 * std::get<1>(all)[0].sum();
  };
  loss(activation_checkpoint(kReentrant, fn, a, 3, b, Tensor(), c)).backward();
  const auto grads = std::make_pair(a.grad().clone(), c.grad().clone());
  a.mutable_grad() = c.mutable_grad() = Tensor();
  loss(fn(a, 3, b, Tensor(), c)).backward();
  EXPECT_TRUE(torch::equal(grads.first, a.grad()));
  EXPECT_TRUE(torch::equal(grads.second, c.grad()));
  EXPECT_FALSE(b.grad().defined());
}

TEST_F(ReentrantCheckpoint, AutocastIsThatOfTheFirstCall) {
  std::vector<Tensor> gradients;
  for (const bool checkpointed : {false, true}) {
    torch::manual_seed(7);
    nn::Linear layer(16, 16);
    const auto fn = [&](const Tensor& x) { return torch::relu(layer->forward(torch::relu(layer->forward(x)))); };
    const Tensor x = values(1, {3, 16}).set_requires_grad(true);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const Tensor y = checkpointed ? activation_checkpoint(kReentrant, fn, x) : fn(x);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    y.sum().backward();
    gradients.push_back(layer->weight.grad());
  }
  EXPECT_TRUE(torch::equal(gradients[0], gradients[1]));
}

TEST_F(ReentrantCheckpoint, WhatItDoesNotOfferIsNamed) {
  const Function fn = [](const Tensor& x) { return torch::sin(x); };
  const Tensor x = values(1, {4}).set_requires_grad(true);
  const auto y = [&] { return activation_checkpoint(kReentrant, fn, x).sum(); };
  expect_invalid("does not go with autograd::grad()", [&] { (void)torch::autograd::grad({y()}, {x}); });
  expect_invalid("has no derivatives of derivatives", [&] { y().backward({}, true, /*create_graph=*/true); });
  expect_invalid("requires grad, so backward() would never come to",
                 [&] { (void)activation_checkpoint(kReentrant, fn, x.detach()); });
  expect_invalid("returns no tensor", [&] {
    activation_checkpoint(
        kReentrant, [](const Tensor&) {}, x);
  });
  expect_invalid("has changed an argument in place", [&] {
    (void)activation_checkpoint(
        kReentrant, [](Tensor z) { return z.mul_(2); }, torch::sin(x));
  });
}

TEST_F(ReentrantCheckpoint, AFunctionThatComputesSomethingElseIsNamed) {
  const Tensor x = values(1, {6}).set_requires_grad(true);
  const auto run = [&](const std::function<std::vector<Tensor>(const Tensor&, bool first)>& fn) {
    bool first = true;
    const auto results = activation_checkpoint(
        kReentrant, [&](const Tensor& z) { return fn(z, std::exchange(first, false)); }, x);
    results[0].sum().backward();
  };
  expect_invalid("returns 1 tensors, and 2 the first time", [&] {
    run([](const Tensor& z, bool is_first) {
      return is_first ? std::vector<Tensor>{z * 2, z * 3} : std::vector<Tensor>{z * 2};
    });
  });
  expect_invalid("returns a tensor [3] where it returned [6] the first time", [&] {
    run([](const Tensor& z, bool is_first) { return std::vector<Tensor>{(is_first ? z : z.narrow(0, 0, 3)) * 2}; });
  });
  try {
    run([](const Tensor& z, bool is_first) {
      if (!is_first) throw std::runtime_error("the second call fails");
      return std::vector<Tensor>{z * 2};
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("the second call fails"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace muster::test::activation_checkpoints
