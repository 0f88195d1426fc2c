// What the tests of muster::LBFGS share: what is minimized, and with which options.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "muster/optim/lbfgs.h"

namespace muster::test::lbfgs {

using at::Tensor;
using optim::LBFGSOptions;
using optim::LineSearch;
using Tensors = std::vector<Tensor>;
constexpr auto kWolfe = LineSearch::kStrongWolfe;

// --- what is minimized; lbfgs_reference.py has the same ---

inline Tensor numbers(double begin, double end, at::IntArrayRef shape, at::ScalarType dtype) {
  return at::linspace(begin, end, c10::multiply_integers(shape), at::kDouble).to(dtype).view(shape);
}

struct Problem {
  Tensors parameters;
  std::function<Tensor()> loss;
};
inline Problem problem(const std::string& name, at::ScalarType dtype) {
  const auto constant = [=](double begin, double end, at::IntArrayRef shape) {
    return numbers(begin, end, shape, dtype);
  };
  const auto parameter = [=](double begin, double end, at::IntArrayRef shape) {
    return numbers(begin, end, shape, dtype).requires_grad_();
  };
  if (name == "convex") {
    const Tensor w = parameter(-1, 2, {7}), unused = parameter(0, 1, {2, 2});
    const Tensor a = at::cos(constant(0, 50, {20, 7})), b = at::sin(constant(0, 9, {20}));
    return {{unused, w}, [=] { return (at::matmul(a, w) - b).square().sum() + 0.1 * w.pow(4).sum(); }};
  }
  if (name == "net") {
    const Tensor x = at::sin(constant(0, 70, {32, 3}));
    const Tensor y = at::cos(at::matmul(x, constant(-1, 1, {3, 2})) * 2);
    const Tensor inner = parameter(-1, 1, {8, 3}), bias = parameter(-0.5, 0.5, {8}), outer = parameter(-0.7, 1, {2, 8});
    return {{inner, bias, outer},
            [=] { return (at::matmul(at::tanh(at::matmul(x, inner.t()) + bias), outer.t()) - y).square().mean(); }};
  }
  if (name == "valley") {  // Rosenbrock's: curved, and flat along its bottom
    const Tensor w = parameter(-1.2, 1, {6});
    return {{w}, [=] {
              const Tensor from = w.slice(0, 0, 5), to = w.slice(0, 1);
              return (100 * (to - from.square()).square() + (1 - from).square()).sum();
            }};
  }
  if (name == "complex") {
    const Tensor z = at::complex(constant(-1, 1, {4}), constant(0.5, -0.3, {4})).requires_grad_();
    const Tensor u = parameter(-1, 1, {4});
    const Tensor c = at::complex(at::cos(constant(0, 20, {6, 4})), at::sin(constant(0, 13, {6, 4})));
    return {{z, u}, [=] {
              return (at::matmul(c, z) - 1).abs().square().sum() + (u - at::real(z)).square().sum() +
                     0.1 * u.pow(4).sum();
            }};
  }
  const Tensor w = parameter(-1, 2, {6, 3}), t = at::cos(constant(0, 9, {5, 3}));  // "sparse"
  const Tensor rows = at::tensor({0, 2, 2, 5, 1}, at::kLong);
  return {{w},
          [=] { return (at::embedding(w, rows, -1, /*scale_grad_by_freq=*/false, /*sparse=*/true) - t).pow(4).sum(); }};
}

inline void make_steps(torch::optim::Optimizer& optimizer, const Problem& problem, int count) {
  for (int step = 0; step < count; ++step)
    optimizer.step([&] {
      optimizer.zero_grad();
      Tensor loss = problem.loss();
      loss.backward();
      return loss;
    });
}

inline void copy_values(const Tensors& from, const Tensors& to) {
  for (size_t i = 0; i < from.size(); ++i) to[i].detach().copy_(from[i].detach());
}
inline void expect_equal(const Tensors& a, const Tensors& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << what << ", parameter " << i;
}
inline double farthest_of(const Tensors& a, const Tensors& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, (a[i] - b[i]).abs().max().item<double>());
  return most;
}

inline int64_t calls_of(muster::LBFGS& optimizer) {
  return optimizer.state_dict().at("state.0.func_evals").item<int64_t>();
}

class Lbfgs : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

// --- Python ---

struct Case {
  const char* problem;
  const char* python;
  LBFGSOptions options;
};
inline std::vector<Case> cases() {
  return {
      {"convex", "lr=0.02", {.lr = 0.02}},
      {"convex", "line_search_fn='strong_wolfe'", {.line_search_fn = kWolfe}},
      {"convex", "lr=0.3, max_iter=3, max_eval=2", {.lr = 0.3, .max_iter = 3, .max_eval = 2}},
      {"net", "lr=0.1, max_iter=4, history_size=5", {.lr = 0.1, .max_iter = 4, .history_size = 5}},
      {"net",
       "lr=0.1, max_iter=4, history_size=5, line_search_fn='strong_wolfe'",
       {.lr = 0.1, .max_iter = 4, .history_size = 5, .line_search_fn = kWolfe}},
      {"net",
       "max_iter=6, max_eval=3, tolerance_grad=1e-3, tolerance_change=1e-5, line_search_fn='strong_wolfe'",
       {.max_iter = 6, .max_eval = 3, .tolerance_grad = 1e-3, .tolerance_change = 1e-5, .line_search_fn = kWolfe}},
      {"net", "max_iter=1, line_search_fn='strong_wolfe'", {.max_iter = 1, .line_search_fn = kWolfe}},
      {"valley", "lr=0.001, max_iter=5", {.lr = 0.001, .max_iter = 5}},
      {"valley",
       "lr=10, max_iter=3, max_eval=30, line_search_fn='strong_wolfe'",
       {.lr = 10, .max_iter = 3, .max_eval = 30, .line_search_fn = kWolfe}},
      {"valley",
       "lr=0.01, max_iter=2, max_eval=50, history_size=1, line_search_fn='strong_wolfe'",
       {.lr = 0.01, .max_iter = 2, .max_eval = 50, .history_size = 1, .line_search_fn = kWolfe}},
      {"complex", "lr=0.05, max_iter=3", {.lr = 0.05, .max_iter = 3}},
      {"complex", "max_iter=3, line_search_fn='strong_wolfe'", {.max_iter = 3, .line_search_fn = kWolfe}},
      {"sparse", "lr=0.05, max_iter=3", {.lr = 0.05, .max_iter = 3}},
      {"sparse", "max_iter=3, line_search_fn='strong_wolfe'", {.max_iter = 3, .line_search_fn = kWolfe}},
  };
}

inline const char* name_of(at::ScalarType dtype) { return dtype == at::kDouble ? "float64" : "float32"; }

}  // namespace muster::test::lbfgs
