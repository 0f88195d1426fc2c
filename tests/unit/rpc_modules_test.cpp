// Modules and optimizers as arguments.
#include "muster/rpc/modules.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <string>
#include <utility>

#include "muster/base/error.h"
#include "muster/optim/optimizers.h"

namespace muster::rpc {
namespace {

torch::nn::Sequential net(int out = 3) {
  return torch::nn::Sequential(torch::nn::Linear(2, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, out));
}
template <typename T>
T sent(T value) {
  Payload payload = pack(std::move(value));
  PayloadReader reader{payload.body, payload.tensors};
  return std::get<0>(unpack<T>(reader));
}

TEST(RpcModules, StateThereAndBack) {
  auto from = net(), to = net();
  from->forward(torch::randn({5, 2}));  // the batch norm's buffers change
  from->eval();
  const auto state = sent(state_of(*from));
  ASSERT_EQ(state.parameters.size(), 6u);
  EXPECT_EQ(state.parameters[0].first, "0.weight");
  EXPECT_TRUE(state.parameters[0].second.is_same(from->named_parameters()["0.weight"]));  // no copy
  EXPECT_EQ(state.buffers.size(), 3u);
  load(*to, state);
  const auto x = torch::randn({5, 2});
  EXPECT_FALSE(to->is_training());
  EXPECT_TRUE(torch::equal(from->forward(x), to->forward(x)));
  EXPECT_TRUE(to->parameters()[0].requires_grad());
}

TEST(RpcModules, WhatDoesNotFitChangesNothing) {
  auto to = net();
  const auto before = to->parameters()[0].clone();
  EXPECT_THROW(load(*to, state_of(*net(4))), Mismatch);
  auto state = state_of(*net());
  auto less = state, more = state, twice = state;
  less.parameters.pop_back();
  more.buffers.emplace_back("more", torch::ones({1}));
  twice.parameters.push_back(twice.parameters[0]);
  for (const auto& bad : {less, more, twice}) EXPECT_THROW(load(*to, bad), Mismatch);
  EXPECT_TRUE(torch::equal(to->parameters()[0], before));
}

void step(torch::nn::Sequential& module, torch::optim::Optimizer& optimizer) {
  optimizer.step([&] {
    optimizer.zero_grad();
    const at::Tensor loss = module->forward(torch::linspace(-1, 2, 8).view({4, 2})).square().sum();
    loss.backward();
    return loss;
  });
}

template <typename Optimizer>
void expect_goes_on(const auto& options, bool has_tensors = true) {
  auto a = net(), b = net();
  auto others = options;
  if constexpr (requires { others.lr(0.5); })
    others.lr(0.5);
  else
    others.lr = 0.5;
  Optimizer from(a->parameters(), options), to(b->parameters(), others);
  for (int i = 0; i < 2; ++i) step(a, from);
  step(b, to);  // what it has learned is forgotten
  const OptimizerState state = state_of(from);
  EXPECT_EQ(state.tensors.empty(), !has_tensors);
  load(*b, state_of(*a));
  load(to, sent(state));
  for (int i = 0; i < 2; ++i) {
    step(a, from);
    step(b, to);
  }
  for (size_t i = 0; i < a->parameters().size(); ++i)
    EXPECT_TRUE(torch::equal(a->parameters()[i], b->parameters()[i])) << typeid(Optimizer).name() << " " << i;
}

TEST(RpcModules, OptimizersGoOnWhereTheyWere) {
  expect_goes_on<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
  expect_goes_on<torch::optim::Adam>(torch::optim::AdamOptions(0.1).amsgrad(true));
  expect_goes_on<torch::optim::LBFGS>(torch::optim::LBFGSOptions(0.1), /*has_tensors=*/false);
  expect_goes_on<muster::AdamW>(muster::AdamW::Options{.lr = 0.1});
}

TEST(RpcModules, StatesOfOptimizersAreNamedTensorsAndFit) {
  auto a = net(), b = net(4);
  torch::optim::Adam from(a->parameters(), 0.1), to(b->parameters(), 0.1);
  torch::optim::SGD other(a->parameters(), 0.1);
  step(a, from);
  step(b, to);
  const OptimizerState state = state_of(from);
  ASSERT_EQ(state.tensors.size(), 12u);
  EXPECT_EQ(state.tensors[0].first, "0/exp_avg");
  const auto& own = static_cast<torch::optim::AdamParamState&>(*from.state()[a->parameters()[0].unsafeGetTensorImpl()]);
  EXPECT_TRUE(state.tensors[0].second.is_same(own.exp_avg()));  // no copy
  ASSERT_EQ(state.numbers.size(), 6u);
  EXPECT_EQ(state.numbers[5], (std::pair<std::string, int64_t>("5/step", 1)));

  const auto refused = [&](auto& optimizer, const OptimizerState& bad) {
    const auto before = state_of(optimizer);
    try {
      load(optimizer, bad);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Mismatch& error) {
      const auto after = state_of(optimizer);
      EXPECT_EQ(after.tensors.size(), before.tensors.size());
      for (size_t i = 0; i < after.tensors.size(); ++i)
        EXPECT_TRUE(after.tensors[i].second.is_same(before.tensors[i].second));
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(refused(to, state).find("'4/exp_avg' has another shape than the state's, which is [3, 4]"),
            std::string::npos);
  EXPECT_NE(refused(other, state).find("the optimizer has no '0/exp_avg'"), std::string::npos);
  for (const char* const name : {"", "0", "0/", "6/exp_avg", "-1/exp_avg", "0/exp", "x/exp_avg"}) {
    OptimizerState bad = state;
    bad.tensors[0].first = name;
    EXPECT_NE(refused(from, bad).find("the optimizer has no '"), std::string::npos) << name;
  }
  OptimizerState bad = state;
  bad.tensors[0].second = at::Tensor();
  refused(from, bad);
  bad = state;
  bad.numbers[0].first = "0/exp_avg";
  EXPECT_NE(refused(from, bad).find("is not a number"), std::string::npos);
  EXPECT_THROW(load(to, OptimizerState{"no archive"}), CorruptError);
}

}  // namespace
}  // namespace muster::rpc
