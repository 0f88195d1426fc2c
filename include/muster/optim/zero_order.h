// Zero-order differentiation: gradients of functions that autograd cannot differentiate, estimated from their values at
// random points nearby (evolution strategies).
//
//   const auto reward = optim::zero_order([](const Tensor& policy) { return play(policy); },
//                                         {.method = optim::ZeroOrder::kAntithetic, .num_samples = 20, .sigma = 0.1});
//   reward(policy).backward();                        // policy.grad() is an estimate
//
//   zero_order<numbers…>(fn, options)
//     fn(a0, a1, …)   returns a scalar tensor. Autograd does not record it
//     numbers         which arguments get gradients, by their position; default: 0. They are trees of tensors
//                     (comm/tensor_tree.h)
//     .method         kNaive       f(x + sigma z) z / sigma
//                     kForward     (f(x + sigma z) - f(x)) z / sigma            less variance, no more calls
//                     kAntithetic  (f(x + sigma z) - f(x - sigma z)) z / 2 sigma    two calls per sample
//     .num_samples    the estimate is the mean over so many z
//     .sampler        draws a z of a shape; default: standard normal numbers, from .generator if there is one
//
// The function is called once in forward, and num_samples times (kAntithetic: twice that) in backward, in the thread of
// the backward: it may call other workers. The same generator in the same state gives the same gradient. The estimate
// has no gradient of its own.
//
// ZeroOrderGradientModule: a module with the function as its member evaluate(); gradients go to its parameters.
//
//   struct Policy : optim::ZeroOrderGradientModule<Policy> {
//     torch::nn::Linear fc{4, 2};
//     Policy() : ZeroOrderGradientModule({.num_samples = 10}) { register_module("fc", fc); }
//     Tensor evaluate(Game& game) { … }
//   };
//   policy.estimate(std::ref(game)).backward();       // calls evaluate(game)
//
// Errors: InvalidArgument: num_samples below 1, sigma not above 0; a result that is not a scalar; a sample of another
// shape. Thread-safety: that of the function and of the sampler.
// Source: torchopt.diff.zero_order; Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement
// Learning", 2017; Nesterov and Spokoiny, "Random Gradient-Free Minimization of Convex Functions", 2017. TorchOpt's
// forward method multiplies by sigma where it should divide, and subtracts the last difference where it should subtract
// f(x).
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/optim/meta.h"

namespace muster::optim {

enum class ZeroOrder { kNaive, kForward, kAntithetic };

struct ZeroOrderOptions {
  ZeroOrder method = ZeroOrder::kNaive;
  int64_t num_samples = 1;
  double sigma = 1;
  std::function<at::Tensor(const at::Tensor& like)> sampler = {};  // the result has the shape and dtype of `like`
  std::optional<at::Generator> generator = {};
};

namespace detail {

void check(const ZeroOrderOptions& options);
// fn(at), whose gradients by `at` are estimated.
at::Tensor estimate(std::function<at::Tensor(const Tensors& at)> fn, const Tensors& at,
                    const ZeroOrderOptions& options);

template <typename Fn, size_t... kNumbers>
class ZeroOrderFunction {
 public:
  ZeroOrderFunction(Fn fn, ZeroOrderOptions options) : fn_(std::move(fn)), options_(std::move(options)) {
    check(options_);
  }

  template <typename... A>
  at::Tensor operator()(const A&... arguments) const {
    const std::tuple<A...> all(arguments...);
    return detail::estimate(
        [fn = fn_, all](const Tensors& at) {
          return at::Tensor(std::apply(fn, with_leaves_of_numbered<kNumbers...>(all, at)));
        },
        leaves_of_numbered<kNumbers...>(all), options_);
  }

 private:
  Fn fn_;
  ZeroOrderOptions options_;
};

}  // namespace detail

template <size_t... kNumbers, typename Fn>
auto zero_order(Fn fn, ZeroOrderOptions options = {}) {
  if constexpr (sizeof...(kNumbers) == 0) {
    return detail::ZeroOrderFunction<Fn, 0>(std::move(fn), std::move(options));
  } else {
    return detail::ZeroOrderFunction<Fn, kNumbers...>(std::move(fn), std::move(options));
  }
}

// Self derives from it, and must outlive the graph of its estimates, which keeps copies of the arguments.
template <typename Self>
class ZeroOrderGradientModule : public torch::nn::Module {
 public:
  template <typename... A>
  at::Tensor estimate(const A&... arguments) {
    Self& self = static_cast<Self&>(*this);
    NamedTensors names;
    Tensors at;
    for (const auto& item : named_parameters()) {
      const bool is_known = std::any_of(at.begin(), at.end(), [&](const at::Tensor& one) {
        return one.is_same(item.value());  // a parameter that modules share has several names
      });
      if (is_known) continue;
      names.emplace_back(item.key(), at::Tensor());
      at.push_back(item.value());
    }
    return detail::estimate(
        [&self, names, arguments...](const Tensors& now) {
          auto tensors = names;
          for (size_t i = 0; i < now.size(); ++i) tensors[i].second = now[i];
          return functional_call(self, tensors, [&] { return at::Tensor(self.evaluate(arguments...)); });
        },
        at, options_);
  }

 protected:
  explicit ZeroOrderGradientModule(ZeroOrderOptions options = {}) : options_(std::move(options)) {
    detail::check(options_);
  }

 private:
  ZeroOrderOptions options_;
};

}  // namespace muster::optim
