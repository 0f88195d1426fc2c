// NAdam, RAdam. Source: torch/optim/nadam.py, radam.py. The order of the operations is theirs.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "muster/optim/functional_optimizer.h"
#include "optim/options.h"

namespace muster::optim {
namespace {

using at::Tensor;

// The gradient of the value to be minimized. Decays the parameter, or adds its decay to the gradient.
template <typename Options>
Tensor decayed(const Options& options, double lr, Tensor& parameter, const Tensor& given) {
  const Tensor gradient = options.maximize ? -given : given;
  if (options.weight_decay == 0) return gradient;
  if (!options.decoupled_weight_decay) return gradient.add(parameter, options.weight_decay);
  parameter.mul_(1 - lr * options.weight_decay);
  return gradient;
}

void update_moments(const std::pair<double, double>& betas, const Tensor& gradient, Tensor& average, Tensor& squares) {
  if (!average.defined()) average = at::zeros_like(gradient);
  if (!squares.defined()) squares = at::zeros_like(gradient);
  average.lerp_(gradient, 1 - betas.first);
  squares.mul_(betas.second).addcmul_(gradient, gradient, 1 - betas.second);
}

}  // namespace

NAdam::NAdam(Options options)
    : FunctionalOptimizer(options.lr, {"exp_avg", "exp_avg_sq", "mu_product"}), options_(with_checked_betas(options)) {
  at_least("momentum_decay", options.momentum_decay, 0);
}
void NAdam::update(double lr, Tensor& parameter, const Tensor& given, ParameterState& state) const {
  const Tensor gradient = decayed(options_, lr, parameter, given);
  const auto step = static_cast<double>(state.step);
  const auto [beta1, beta2] = options_.betas;
  const auto momentum_at = [&, b = beta1](double at) {
    return b * (1.0 - 0.5 * std::pow(0.96, at * options_.momentum_decay));
  };
  const double mu = momentum_at(step), mu_next = momentum_at(step + 1);
  auto& [average, squares, product] = state.kept;
  if (!product.defined()) product = at::scalar_tensor(1, at::kFloat);
  product.mul_(mu);
  update_moments(options_.betas, gradient, average, squares);
  const Tensor below = squares.div(1 - std::pow(beta2, step)).sqrt_().add_(options_.eps);
  const auto so_far = product.item<double>();
  parameter.addcdiv_(gradient, below, -lr * (1.0 - mu) / (1.0 - so_far));
  parameter.addcdiv_(average, below, -lr * mu_next / (1.0 - so_far * mu_next));
}
Tensor NAdam::empty_kept(size_t index, const Tensor& parameter) const {
  return index == 2 ? at::empty({}, at::kFloat) : at::empty_like(parameter);
}

RAdam::RAdam(Options options)
    : FunctionalOptimizer(options.lr, {"exp_avg", "exp_avg_sq"}), options_(with_checked_betas(options)) {}
void RAdam::update(double lr, Tensor& parameter, const Tensor& given, ParameterState& state) const {
  const Tensor gradient = decayed(options_, lr, parameter, given);
  auto& [average, squares, unused] = state.kept;
  update_moments(options_.betas, gradient, average, squares);
  const auto step = static_cast<double>(state.step);
  const auto [beta1, beta2] = options_.betas;
  const double correction1 = 1 - std::pow(beta1, step), correction2 = 1 - std::pow(beta2, step);
  Tensor change = average.div(correction1).mul_(lr);
  // The length of the average of squares; if it is short, their variance cannot be rectified.
  const double longest = 2 / (1 - beta2) - 1;
  const double length = longest - 2 * step * std::pow(beta2, step) / correction2;
  if (length > 5) {
    const double rectified =
        std::sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length));
    change.mul_(squares.sqrt().add_(options_.eps).reciprocal_().mul_(std::sqrt(correction2))).mul_(rectified);
  }
  parameter.add_(change, -1);
}

}  // namespace muster::optim
