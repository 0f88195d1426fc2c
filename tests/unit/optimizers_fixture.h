// What the tests of the optimizers for training loops have in common: parameters, their gradients, and all optimizers.
#pragma once

#include <gtest/gtest.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <type_traits>
#include <vector>

#include "muster/optim/optimizers.h"

namespace muster::test::optimizers {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// Matrices, so that Muon takes them.
inline Tensors start(at::ScalarType dtype = at::kFloat) {
  Tensors all;
  for (const int64_t rows : {3, 5, 2})
    all.push_back(at::linspace(-1, 2, rows * 4, at::kDouble).view({rows, 4}).to(dtype).requires_grad_());
  return all;
}
inline Tensor gradient(const Tensor& parameter, size_t index, int step) {
  return parameter * (0.5 + static_cast<double>(index)) + at::cos(parameter * 3 + 0.3 * step);
}
inline void give_gradients(const Tensors& parameters, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool is_skipped = i == 1 && step % 7 == 3;
    parameters[i].mutable_grad() = is_skipped ? Tensor() : gradient(parameters[i].detach(), i, step);
  }
}
inline void make_steps(torch::optim::Optimizer& optimizer, const Tensors& parameters, int from, int to) {
  for (int step = from; step < to; ++step) {
    give_gradients(parameters, step);
    optimizer.step();
  }
}
inline void expect_equal(const Tensors& a, const Tensors& b, const std::string& what = "") {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << what << " " << i;
}

// In the order of AllOptimizers.
inline constexpr const char* kNames[] = {"SGD",    "ASGD", "Adagrad", "Adadelta", "Adafactor", "Adam", "AdamW",
                                         "Adamax", "Muon", "NAdam",   "RAdam",    "RMSprop",   "Rprop"};

// Calls fn(std::type_identity<O>, name, options): some that are not the defaults.
template <typename Fn>
void for_each_optimizer(const Fn& fn) {
  size_t i = 0;
  AllOptimizers::for_each([&]<typename O>(std::type_identity<TorchOptimizer<O>>) {
    typename O::Options options;
    options.lr = 0.02;
    if constexpr (std::is_same_v<O, optim::SGD>) options.momentum = 0.9;
    if constexpr (requires { options.amsgrad; }) options.amsgrad = true;
    fn(std::type_identity<O>(), std::string(kNames[i++]), options);
  });
}

}  // namespace muster::test::optimizers
