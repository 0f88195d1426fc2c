// Adam, AdamW, Adamax. Source: torch/optim/adam.py, adamw.py, adamax.py. The order of the operations is theirs, so that
// the results are equal to the bit. If libtorch's fused kernels can take Adam's and AdamW's tensors, the results are
// those of fused=True.
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "muster/optim/functional_optimizer.h"
#include "optim/fused.h"
#include "optim/options.h"

namespace muster::optim {
namespace {

using at::Tensor;

template <typename Options>
void step_of_adam(const Options& options, bool decoupled, double lr, Tensor& parameter, Tensor gradient,
                  ParameterState& state) {
  if (options.maximize) gradient = -gradient;
  if (options.weight_decay != 0) {
    if (decoupled)
      parameter.mul_(1 - lr * options.weight_decay);
    else
      gradient = gradient.add(parameter, options.weight_decay);
  }
  auto& [average, squares, most] = state.kept;
  if (!average.defined()) average = at::zeros_like(parameter);
  if (!squares.defined()) squares = at::zeros_like(parameter);
  const auto [beta1, beta2] = options.betas;
  average.lerp_(gradient, 1 - beta1);
  squares.mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
  const double step = static_cast<double>(state.step);
  const double correction1 = 1 - std::pow(beta1, step), correction2 = std::sqrt(1 - std::pow(beta2, step));
  if (options.amsgrad) {
    if (!most.defined()) most = at::zeros_like(parameter);
    at::maximum_out(most, most, squares);
  }
  const Tensor below = (options.amsgrad ? most : squares).sqrt().div_(correction2).add_(options.eps);
  parameter.addcdiv_(average, below, -lr / correction1);
}

// What one call of the kernel takes: parameters of one dtype and device whose next step has the same number.
struct Group {
  std::vector<Tensor> parameters, gradients, averages, squares, most, steps;
  StepCounter counter;
};

// Adds each item that the kernel can take to a group, and passes the others to alone(), in their order. Then passes the
// groups to fused(). If something throws, each item has either made its whole step or none of it.
template <typename Options, typename Items, typename Alone, typename Fused>
void step_of_all(const Options& options, double lr, Items& items, const Alone& alone, const Fused& fused) {
  std::map<FusedKey<int64_t>, Group> groups;
  for (auto& item : items) {
    const Tensor& parameter = item.parameter;
    const auto kept_fits = [&](const Tensor& kept) { return !kept.defined() || fits(parameter, kept); };
    auto& [average, squares, most] = item.state->kept;
    if (!fusible(parameter, item.gradient) || !kept_fits(average) || !kept_fits(squares) || !kept_fits(most)) {
      alone(item);
      continue;
    }
    if (!average.defined()) average = at::zeros_like(parameter);
    if (!squares.defined()) squares = at::zeros_like(parameter);
    if (options.amsgrad && !most.defined()) most = at::zeros_like(parameter);
    const int64_t step = item.state->step + 1;  // a parameter that is in the list twice makes two steps
    Group& group = groups[fused_key(parameter, step)];
    group.counter.count(*item.state);
    // One tensor for all parameters, because the kernel only reads it.
    group.steps.push_back(group.steps.empty() ? step_number(step, parameter) : group.steps.front());
    group.parameters.push_back(parameter);
    group.gradients.push_back(item.gradient);
    group.averages.push_back(average);
    group.squares.push_back(squares);
    if (options.amsgrad) group.most.push_back(most);
  }
  for (auto& [key, group] : groups) {
    fused(group.parameters, group.gradients, group.averages, group.squares, group.most, group.steps, lr,
          options.betas.first, options.betas.second, options.weight_decay, options.eps, options.amsgrad,
          options.maximize);
    group.counter.made();
    for (const auto* written : {&group.parameters, &group.averages, &group.squares, &group.most})
      mark_written(*written);
  }
}

}  // namespace

Adam::Adam(Options options)
    : FunctionalOptimizer(options.lr, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
      options_(with_checked_betas(options)) {}
void Adam::update(double lr, Tensor& parameter, const Tensor& gradient, ParameterState& state) const {
  step_of_adam(options_, false, lr, parameter, gradient, state);
}
void Adam::update_all(double lr, std::vector<Item>& items) const {
  step_of_all(
      options_, lr, items, [&](Item& item) { update_one(lr, item); },
      [](const auto&... all) { at::_fused_adam_(all...); });
}

AdamW::AdamW(Options options)
    : FunctionalOptimizer(options.lr, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
      options_(with_checked_betas(options)) {}
void AdamW::update(double lr, Tensor& parameter, const Tensor& gradient, ParameterState& state) const {
  step_of_adam(options_, true, lr, parameter, gradient, state);
}
void AdamW::update_all(double lr, std::vector<Item>& items) const {
  step_of_all(
      options_, lr, items, [&](Item& item) { update_one(lr, item); },
      [](const auto&... all) { at::_fused_adamw_(all...); });
}

Adamax::Adamax(Options options)
    : FunctionalOptimizer(options.lr, {"exp_avg", "exp_inf"}), options_(with_checked_betas(options)) {}
void Adamax::update(double lr, Tensor& parameter, const Tensor& given, ParameterState& state) const {
  Tensor gradient = options_.maximize ? -given : given;
  if (options_.weight_decay != 0) gradient = gradient.add(parameter, options_.weight_decay);
  auto& [average, norm, unused] = state.kept;
  if (!average.defined()) average = at::zeros_like(parameter);
  if (!norm.defined()) norm = at::zeros_like(parameter);
  const auto [beta1, beta2] = options_.betas;
  average.lerp_(gradient, 1 - beta1);
  norm.mul_(beta2);
  at::maximum_out(norm, norm, gradient.abs().add_(options_.eps));
  parameter.addcdiv_(average, norm, -lr / (1 - std::pow(beta1, static_cast<double>(state.step))));
}

}  // namespace muster::optim
