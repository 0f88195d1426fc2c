#include "muster/optim/zero_order.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>

#include "base/text.h"
#include "muster/base/error.h"
#include "optim/options.h"
#include "optim/recipe.h"

namespace muster::optim {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Estimate {
  std::function<Tensor(const Tensors&)> fn;
  ZeroOrderOptions options;

  Tensor value(const Tensors& at) const {
    const at::NoGradGuard no_grad;
    const Tensor result = fn(at);
    if (!result.defined() || result.dim() != 0 || !result.is_floating_point())
      throw InvalidArgument(text("a function with estimated gradients: expected a scalar tensor of floats, got ",
                                 result.defined()
                                     ? text("one of shape ", result.sizes(), " and dtype ", result.scalar_type())
                                     : "an undefined one"));
    return result;
  }

  Tensor sample(const Tensor& like) const {
    if (!options.sampler) return at::randn(like.sizes(), options.generator, like.options());
    Tensor drawn = options.sampler(like);
    if (!drawn.defined() || drawn.sizes() != like.sizes())
      throw InvalidArgument(text("the sampler: expected a tensor of shape ", like.sizes(), ", got ",
                                 drawn.defined() ? text(drawn.sizes()) : "no tensor"));
    return drawn;
  }
};

class ZeroOrderGradient : public torch::autograd::Function<ZeroOrderGradient> {
 public:
  static Tensor forward(AutogradContext* context, at::TensorList at, Estimate estimate) {
    const Tensors here(at.begin(), at.end());
    const Tensor result = estimate.value(here).detach();
    variable_list saved = here;
    if (estimate.options.method == ZeroOrder::kForward) saved.push_back(result);
    context->save_for_backward(std::move(saved));
    keep(context, std::move(estimate));
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& to) {
    const at::NoGradGuard no_grad;
    const Estimate& estimate = kept<Estimate>(context);
    const auto& [method, samples, sigma, sampler, generator] = estimate.options;
    variable_list at = context->get_saved_variables();
    Tensor value;
    if (method == ZeroOrder::kForward) {
      value = at.back();
      at.pop_back();
    }
    variable_list gradients(at.size() + 1);  // the last: the function's
    for (size_t i = 0; i < at.size(); ++i)
      if (moves(at[i])) gradients[i] = at::zeros_like(at[i]);
    for (int64_t sample = 0; sample < samples; ++sample) {
      Tensors noise(at.size());
      for (size_t i = 0; i < at.size(); ++i)
        if (moves(at[i])) noise[i] = estimate.sample(at[i]);
      const auto moved_by = [&](double times) {
        Tensors moved = at;
        for (size_t i = 0; i < at.size(); ++i)
          if (moves(at[i])) moved[i] = at[i].add(noise[i], times);
        return estimate.value(moved);
      };
      Tensor slope = moved_by(sigma);
      if (method == ZeroOrder::kForward) slope = slope - value;
      if (method == ZeroOrder::kAntithetic) slope = (slope - moved_by(-sigma)) / 2;
      const Tensor weight = to[0] * slope / (sigma * static_cast<double>(samples));
      for (size_t i = 0; i < at.size(); ++i)
        if (moves(at[i])) gradients[i].add_(weight * noise[i]);
    }
    return gradients;
  }

 private:
  static bool moves(const Tensor& tensor) { return tensor.defined() && tensor.is_floating_point(); }
};

}  // namespace

void detail::check(const ZeroOrderOptions& options) {
  require(options.num_samples >= 1, "num_samples", static_cast<double>(options.num_samples), "1 or more");
  require(options.sigma > 0, "sigma", options.sigma, "a number above 0");
}

Tensor detail::estimate(std::function<Tensor(const Tensors& at)> fn, const Tensors& at,
                        const ZeroOrderOptions& options) {
  return ZeroOrderGradient::apply(at::TensorList(at), Estimate{std::move(fn), options});
}

}  // namespace muster::optim
