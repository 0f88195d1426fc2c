// Modules and optimizers as arguments.
#include "muster/rpc/modules.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "muster/base/error.h"

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

TEST(RpcModules, OptimizersGoOnWhereTheyWere) {
  auto a = net(), b = net();
  load(*b, state_of(*a));
  torch::optim::Adam from(a->parameters(), 0.1), to(b->parameters(), 0.5);
  const auto step = [](auto& module, auto& optimizer) {
    optimizer.zero_grad();
    module->forward(torch::ones({4, 2})).sum().backward();
    optimizer.step();
  };
  step(a, from);
  load(*b, state_of(*a));
  load(to, sent(state_of(from)));
  step(a, from);
  step(b, to);
  EXPECT_TRUE(torch::equal(a->parameters()[0], b->parameters()[0]));
  EXPECT_THROW(load(to, OptimizerState{"no archive"}), CorruptError);
}

}  // namespace
}  // namespace muster::rpc
