// Transformations that keep no moments, chains, and what all transformations share.
#include "muster/optim/transform.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/text.h"
#include "muster/base/error.h"
#include "optim/add_scaled.h"
#include "optim/options.h"
#include "optim/transform_parts.h"

namespace muster::optim {

using at::Tensor;

GradientTransformation::GradientTransformation(Init init, Update update)
    : GradientTransformation(std::move(init), std::move(update), {}) {}

GradientTransformation::GradientTransformation(Init init, Update update, Unscaled unscaled)
    : parts_(std::make_shared<const Parts>(Parts{std::move(init), std::move(update), std::move(unscaled)})) {}

void GradientTransformation::check(const Tensors& updates, at::TensorList parameters) const {
  if (!parameters.empty() && parameters.size() != updates.size())
    throw InvalidArgument(
        text("update(): expected ", parameters.size(), " updates, one for each parameter, got ", updates.size()),
        "Pass trees with the same leaves, undefined tensors for parameters that have no gradient");
}

void GradientTransformation::update_list(Tensors& updates, OptState& state, at::TensorList parameters,
                                         UpdateOptions options) const {
  check(updates, parameters);
  if (options.inplace) {
    std::set<const void*> seen;  // autograd may return one tensor as the gradient of several inputs
    for (Tensor& one : updates)
      if (one.defined() && one.layout() == at::kStrided && one.numel() != 0 &&
          !seen.insert(one.const_data_ptr()).second)
        one = one.clone();
  }
  parts_->update(updates, state, parameters, options);
}

double GradientTransformation::update_unscaled(Tensors& updates, OptState& state, at::TensorList parameters) const {
  check(updates, parameters);
  if (parts_->unscaled) return parts_->unscaled(updates, state, parameters);
  parts_->update(updates, state, parameters, {});
  return 1;
}

void detail::keys_differ() { throw InvalidArgument("parameters and updates have different keys"); }

Tensors detail::apply_updates(Tensors parameters, const Tensors& updates, bool inplace) {
  if (parameters.size() != updates.size())
    throw InvalidArgument(text("apply_updates(): expected ", parameters.size(),
                               " updates, one for each parameter, got ", updates.size()));
  if (!inplace) return add_scaled(std::move(parameters), updates, 1);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i)
    if (updates[i].defined()) parameters[i].add_(updates[i]);
  return parameters;
}

namespace {

// A learning rate that is a tensor, as a factor that changes neither shape nor dtype.
Tensor scalar_like(const Tensor& rate, const Tensor& update) {
  if (!rate.defined() || rate.numel() != 1)
    throw InvalidArgument(text("a learning rate: expected one element, got ",
                               rate.defined() ? text("shape ", rate.sizes()) : "an undefined tensor"));
  return rate.reshape({}).to(update.options());
}

}  // namespace

GradientTransformation identity() {
  return {[](at::TensorList) { return OptState{}; }, [](Tensors&, OptState&, at::TensorList, UpdateOptions) {}};
}

GradientTransformation chain(std::vector<GradientTransformation> all) {
  if (all.empty()) return identity();
  const auto check = [n = all.size()](const OptState& state) {
    if (state.parts.size() != n)
      throw InvalidArgument(text("the state: expected ", n, " parts, as the chain has, got ", state.parts.size()),
                            "Pass a state from init() of this chain");
  };
  return {[all](at::TensorList parameters) {
            OptState state;
            for (const auto& one : all) state.parts.push_back(one.init_list(parameters));
            return state;
          },
          [all, check](Tensors& updates, OptState& state, at::TensorList parameters, UpdateOptions options) {
            check(state);
            for (size_t i = 0; i < all.size(); ++i) all[i].update_list(updates, state.parts[i], parameters, options);
          },
          [all, check](Tensors& updates, OptState& state, at::TensorList parameters) {
            check(state);
            for (size_t i = 0; i + 1 < all.size(); ++i) all[i].update_list(updates, state.parts[i], parameters);
            return all.back().update_unscaled(updates, state.parts.back(), parameters);
          }};
}

GradientTransformation scale(double by) {
  return {[](at::TensorList) { return OptState{}; },
          [by](Tensors& updates, OptState&, at::TensorList, UpdateOptions options) {
            for (Tensor& g : updates)
              if (g.defined()) g = Arithmetic{options.inplace}.mul(g, by);
          },
          [by](Tensors&, OptState&, at::TensorList) { return by; }};
}

GradientTransformation scale_by_schedule(Rate by) {
  return {[](at::TensorList parameters) {
            OptState state;
            state.counts.assign(parameters.size(), 0);
            return state;
          },
          [by = std::move(by)](Tensors& updates, OptState& state, at::TensorList, UpdateOptions options) {
            check_state(state, updates, 0);
            const Arithmetic in{options.inplace};
            for (size_t i = 0; i < updates.size(); ++i) {
              if (!updates[i].defined()) continue;
              const auto factor = by(state.counts[i]++);
              if (const auto* const tensor = std::get_if<Tensor>(&factor))
                updates[i] = in.mul(updates[i], scalar_like(*tensor, updates[i]));
              else
                updates[i] = in.mul(updates[i], std::get<double>(factor));
            }
          }};
}

GradientTransformation nan_to_num(double nan, std::optional<double> posinf, std::optional<double> neginf) {
  return {[](at::TensorList) { return OptState{}; },
          [=](Tensors& updates, OptState&, at::TensorList, UpdateOptions options) {
            for (Tensor& g : updates)
              if (g.defined())
                g = options.inplace ? g.nan_to_num_(nan, posinf, neginf) : g.nan_to_num(nan, posinf, neginf);
          }};
}

GradientTransformation clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  require(max_norm >= 0, "max_norm", max_norm, "0 or more");
  require(norm_type > 0, "norm_type", norm_type, "a number above 0");
  return {[](at::TensorList) { return OptState{}; },
          [=](Tensors& updates, OptState&, at::TensorList, UpdateOptions options) {
            double total;
            {
              const at::NoGradGuard no_grad;
              Tensors norms;
              for (const Tensor& one : updates)
                if (one.defined()) norms.push_back(at::norm(one, norm_type));
              if (norms.empty()) return;
              for (Tensor& one : norms) one = one.to(norms[0].device());
              total = at::norm(at::stack(norms), norm_type).item<double>();
            }
            if (error_if_nonfinite && !std::isfinite(total))
              throw InvalidArgument(text("the norm of the gradients: expected a finite number, got ", total),
                                    "Leave out error_if_nonfinite to scale by it all the same");
            const double factor = std::min(max_norm / (total + 1e-6), 1.0);
            const Arithmetic in{options.inplace};
            for (Tensor& one : updates)
              if (one.defined()) one = in.mul(one, factor);
          }};
}

GradientTransformation masked(GradientTransformation inner, Mask mask) {
  const auto of = [mask = std::move(mask)](at::TensorList leaves) {
    const auto* const function = std::get_if<1>(&mask);
    auto which = function ? (*function)(leaves) : std::get<0>(mask);
    if (which.size() != leaves.size())
      throw InvalidArgument(
          text("the mask: expected ", leaves.size(), " entries, one for each leaf, got ", which.size()));
    return which;
  };
  const auto taken = [](at::TensorList leaves, const std::vector<bool>& which) {
    Tensors all(leaves.size());
    for (size_t i = 0; i < all.size(); ++i)
      if (which[i]) all[i] = leaves[i];
    return all;
  };
  return {[inner, of, taken](at::TensorList parameters) {
            OptState state;
            state.parts.push_back(inner.init_list(taken(parameters, of(parameters))));
            return state;
          },
          [inner, of, taken](Tensors& updates, OptState& state, at::TensorList parameters, UpdateOptions options) {
            if (state.parts.size() != 1) throw InvalidArgument("the state is not that of a masked transformation");
            const auto which = of(updates);
            Tensors chosen = taken(updates, which);
            inner.update_list(chosen, state.parts[0], parameters, options);
            for (size_t i = 0; i < updates.size(); ++i)
              if (which[i]) updates[i] = chosen[i];
          }};
}

GradientTransformation add_decayed_weights(double weight_decay, std::optional<Mask> mask) {
  at_least("weight_decay", weight_decay, 0);
  auto plain = decayed(weight_decay, /*maximize=*/false);
  return mask ? masked(std::move(plain), std::move(*mask)) : plain;
}

GradientTransformation decayed(double weight_decay, bool maximize) {
  if (weight_decay == 0 && !maximize) return identity();
  return {[](at::TensorList) { return OptState{}; },
          [=](Tensors& updates, OptState&, at::TensorList parameters, UpdateOptions options) {
            if (weight_decay != 0 && parameters.empty() && !updates.empty())
              throw InvalidArgument("weight decay needs the parameters",
                                    "Pass them: update(updates, state, parameters).");
            const Arithmetic in{options.inplace};
            for (size_t i = 0; i < updates.size(); ++i) {
              if (!updates[i].defined()) continue;
              if (maximize) updates[i] = in.mul(updates[i], -1);
              if (weight_decay != 0) updates[i] = in.add(updates[i], parameters[i], weight_decay);
            }
          }};
}

void check_state(const OptState& state, const Tensors& updates, size_t kinds) {
  if (state.counts.size() != updates.size() || state.tensors.size() != kinds * updates.size())
    throw InvalidArgument(
        text("the state: expected ", kinds * updates.size(), " tensors and ", updates.size(), " counts for ",
             updates.size(), " parameters, got ", state.tensors.size(), " and ", state.counts.size()),
        "Pass a state from init() of this transformation, for these parameters");
}

// ------------------------------------------------------------------------------------------------------------
// schedules

Schedule polynomial_schedule(PolynomialScheduleOptions o) {
  require(o.transition_steps > 0, "transition_steps", static_cast<double>(o.transition_steps), "1 or more");
  require(o.transition_begin >= 0, "transition_begin", static_cast<double>(o.transition_begin), "0 or more");
  return [o](int64_t count) {
    const auto steps = static_cast<double>(std::clamp<int64_t>(count - o.transition_begin, 0, o.transition_steps));
    const double left = 1 - steps / static_cast<double>(o.transition_steps);
    return (o.init_value - o.end_value) * std::pow(left, o.power) + o.end_value;
  };
}

Schedule linear_schedule(LinearScheduleOptions o) {
  return polynomial_schedule({.init_value = o.init_value,
                              .end_value = o.end_value,
                              .power = 1,
                              .transition_steps = o.transition_steps,
                              .transition_begin = o.transition_begin});
}

Schedule exponential_decay(ExponentialDecayOptions o) {
  require(o.transition_steps > 0, "transition_steps", static_cast<double>(o.transition_steps), "1 or more");
  require(o.transition_begin >= 0, "transition_begin", static_cast<double>(o.transition_begin), "0 or more");
  require(o.decay_rate > 0, "decay_rate", o.decay_rate, "a number above 0");
  return [o](int64_t count) {
    const auto steps = static_cast<double>(count - o.transition_begin);
    double power = steps / static_cast<double>(o.transition_steps);
    if (o.staircase) power = std::floor(power);
    const double value = steps <= 0 ? o.init_value : o.init_value * std::pow(o.decay_rate, power);
    if (!o.end_value) return value;
    return o.decay_rate < 1 ? std::max(value, *o.end_value) : std::min(value, *o.end_value);
  };
}

// -----------------------------------------------------------------------------------------------------------
// optimizers

namespace {

GradientTransformation scale_by_negative(const Rate& lr) {
  if (!lr.constant())
    return scale_by_schedule(
        [lr](int64_t count) { return std::visit([](auto x) -> Rate::Value { return -x; }, lr(count)); });
  const auto value = lr(0);
  if (const double* const number = std::get_if<double>(&value)) return scale(-at_least("lr", *number, 0));
  return scale_by_schedule([lr](int64_t) { return -std::get<Tensor>(lr(0)); });
}

}  // namespace

GradientTransformation sgd(FuncSGDOptions o) {
  return chain(decayed(at_least("weight_decay", o.weight_decay, 0), o.maximize),
               trace({.momentum = o.momentum,
                      .dampening = o.dampening,
                      .nesterov = o.nesterov,
                      .moment_requires_grad = o.moment_requires_grad}),
               scale_by_negative(o.lr));
}

GradientTransformation adam(FuncAdamOptions o) {
  return chain(decayed(at_least("weight_decay", o.weight_decay, 0), o.maximize),
               scale_by_adam({.betas = o.betas,
                              .eps = o.eps,
                              .eps_root = o.eps_root,
                              .moment_requires_grad = o.moment_requires_grad,
                              .fused = o.fused}),
               scale_by_negative(o.lr));
}

GradientTransformation adamw(FuncAdamWOptions o) {
  return chain(decayed(0, o.maximize),
               scale_by_adam({.betas = o.betas,
                              .eps = o.eps,
                              .eps_root = o.eps_root,
                              .moment_requires_grad = o.moment_requires_grad,
                              .fused = o.fused}),
               add_decayed_weights(o.weight_decay, o.mask), scale_by_negative(o.lr));
}

GradientTransformation adagrad(FuncAdagradOptions o) {
  at_least("lr_decay", o.lr_decay, 0);
  std::vector<GradientTransformation> all{
      decayed(at_least("weight_decay", o.weight_decay, 0), o.maximize),
      scale_by_rss({.initial_accumulator_value = o.initial_accumulator_value, .eps = o.eps})};
  if (o.lr_decay != 0)
    all.push_back(scale_by_schedule(
        [decay = o.lr_decay](int64_t count) { return 1 / (1 + decay * static_cast<double>(count)); }));
  all.push_back(scale_by_negative(o.lr));
  return chain(std::move(all));
}

GradientTransformation rmsprop(FuncRMSpropOptions o) {
  const ScaleByRmsOptions scaler{.alpha = o.alpha, .eps = o.eps, .initial_scale = o.initial_scale};
  return chain(decayed(at_least("weight_decay", o.weight_decay, 0), o.maximize),
               o.centered ? scale_by_stddev(scaler) : scale_by_rms(scaler),
               trace({.momentum = o.momentum, .nesterov = o.nesterov}), scale_by_negative(o.lr));
}

GradientTransformation adadelta(FuncAdadeltaOptions o) {
  return chain(decayed(at_least("weight_decay", o.weight_decay, 0), o.maximize),
               scale_by_adadelta({.rho = o.rho, .eps = o.eps, .moment_requires_grad = o.moment_requires_grad}),
               scale_by_negative(o.lr));
}

GradientTransformation adamax(FuncAdamaxOptions o) {
  return chain(decayed(at_least("weight_decay", o.weight_decay, 0), o.maximize),
               scale_by_adamax({.betas = o.betas, .eps = o.eps, .moment_requires_grad = o.moment_requires_grad}),
               scale_by_negative(o.lr));
}

GradientTransformation radam(FuncRAdamOptions o) {
  return chain(decayed(at_least("weight_decay", o.weight_decay, 0), o.maximize),
               scale_by_radam({.betas = o.betas, .eps = o.eps, .moment_requires_grad = o.moment_requires_grad}),
               scale_by_negative(o.lr));
}

}  // namespace muster::optim
