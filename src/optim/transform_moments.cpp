// Transformations that keep moments of the updates.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>

#include <array>
#include <cmath>

#include "muster/optim/transform.h"
#include "optim/fused_adam.h"
#include "optim/options.h"
#include "optim/transform_parts.h"

namespace muster::optim {
namespace {

using at::Tensor;

OptState moments(at::TensorList parameters, const std::vector<double>& initial, bool requires_grad) {
  OptState state;
  state.counts.assign(parameters.size(), 0);
  for (const double value : initial)
    for (const Tensor& one : parameters)
      state.tensors.push_back(one.defined() ? at::full_like(one, value).set_requires_grad(requires_grad) : Tensor());
  return state;
}

// A transformation that keeps one tensor for each of `initial` and for each parameter. fn(g, kept, count, arithmetic)
// returns the update and replaces the tensors in `kept`; `count` counts this update already.
template <size_t kKinds, typename Fn>
GradientTransformation with_moments(std::array<double, kKinds> initial, bool requires_grad, Fn fn) {
  return {[=](at::TensorList parameters) {
            return moments(parameters, std::vector<double>(initial.begin(), initial.end()), requires_grad);
          },
          [fn](Tensors& updates, OptState& state, at::TensorList, UpdateOptions options) {
            const size_t n = updates.size();
            check_state(state, updates, kKinds);
            for (size_t i = 0; i < n; ++i) {
              if (!updates[i].defined()) continue;
              std::array<Tensor*, kKinds> kept;
              for (size_t kind = 0; kind < kKinds; ++kind) kept[kind] = &state.tensors[kind * n + i];
              updates[i] = fn(updates[i], kept, static_cast<double>(++state.counts[i]), Arithmetic{options.inplace});
            }
          }};
}

Tensor adam(const AdamNumbers& of, const Tensor& g, std::array<Tensor*, 2> kept, double count, const Arithmetic& in) {
  Tensor &mean = *kept[0], &square = *kept[1];
  mean = in.mean(mean, g, of.beta1);
  square = in.mean_of_squares(square, g, of.beta2);
  const Tensor by = square.div(1 - std::pow(of.beta2, count)).add_(of.eps_root);
  return mean.div(1 - std::pow(of.beta1, count)).div_(sqrt_without_infinity(by).add(of.eps));
}

// The parameters for which there is a kernel go to it together: those that autograd records in one node of the graph,
// the others without one.
void fused_adam_of_all(const AdamNumbers& of, Tensors& updates, OptState& state, UpdateOptions options) {
  const size_t n = updates.size();
  struct Group {
    AdamBatch batch;
    std::vector<size_t> places;
  } recorded, plain;
  for (size_t i = 0; i < n; ++i) {
    if (!updates[i].defined()) continue;
    Tensor &mean = state.tensors[i], &square = state.tensors[n + i];
    const auto count = static_cast<double>(++state.counts[i]);
    if (!AdamBatch::takes(updates[i], mean, square)) {
      updates[i] = adam(of, updates[i], {&mean, &square}, count, Arithmetic{options.inplace});
      continue;
    }
    const bool records = updates[i].requires_grad() || mean.requires_grad() || square.requires_grad();
    Group& group = records && at::GradMode::is_enabled() ? recorded : plain;
    group.batch.add(updates[i], mean, square, count);
    group.places.push_back(i);
  }
  for (Group* const group : {&recorded, &plain}) {
    if (group->places.empty()) continue;
    group->batch.run(of, options.inplace && group == &plain);
    for (size_t k = 0; k < group->places.size(); ++k) {
      updates[group->places[k]] = group->batch.updates[k];
      state.tensors[group->places[k]] = group->batch.means[k];
      state.tensors[n + group->places[k]] = group->batch.squares[k];
    }
  }
}

void check(double eps, std::pair<double, double> betas) {
  at_least("eps", eps, 0);
  check_betas(betas.first, betas.second);
}

}  // namespace

GradientTransformation trace(TraceOptions o) {
  at_least("momentum", o.momentum, 0);
  require(!o.nesterov || (o.momentum > 0 && o.dampening == 0), "nesterov", o.nesterov,
          "false without momentum or with dampening");
  if (o.momentum == 0) return identity();
  return with_moments<1>({0}, o.moment_requires_grad, [o](const Tensor& g, auto kept, double count, Arithmetic in) {
    Tensor& trace = *kept[0];
    trace = count == 1 ? in.add(trace, g) : in.mul(trace, o.momentum).add_(g, 1 - o.dampening);
    if (o.nesterov) return in.add(g, trace, o.momentum);
    return in.inplace ? Tensor(g).copy_(trace) : trace;
  });
}

GradientTransformation scale_by_adam(ScaleByAdamOptions o) {
  check(o.eps, o.betas);
  at_least("eps_root", o.eps_root, 0);
  const AdamNumbers of{o.betas.first, o.betas.second, o.eps, o.eps_root};
  if (!o.fused)
    return with_moments<2>(
        {0, 0}, o.moment_requires_grad,
        [of](const Tensor& g, auto kept, double count, Arithmetic in) { return adam(of, g, kept, count, in); });
  return {[o](at::TensorList parameters) {
            return moments(parameters, {0, 0}, o.moment_requires_grad);
          },
          [of](Tensors& updates, OptState& state, at::TensorList, UpdateOptions options) {
            check_state(state, updates, 2);
            fused_adam_of_all(of, updates, state, options);
          }};
}

GradientTransformation scale_by_adamax(ScaleByAdamaxOptions o) {
  check(o.eps, o.betas);
  return with_moments<2>({0, 0}, o.moment_requires_grad, [o](const Tensor& g, auto kept, double count, Arithmetic in) {
    Tensor &mean = *kept[0], &largest = *kept[1];
    mean = in.mean(mean, g, o.betas.first);
    largest = at::maximum(largest.mul(o.betas.second), g.abs().add_(o.eps));
    return mean.div(largest).div_(1 - std::pow(o.betas.first, count));
  });
}

GradientTransformation scale_by_radam(ScaleByRAdamOptions o) {
  check(o.eps, o.betas);
  return with_moments<2>({0, 0}, o.moment_requires_grad, [o](const Tensor& g, auto kept, double count, Arithmetic in) {
    const auto [beta1, beta2] = o.betas;
    Tensor &mean = *kept[0], &square = *kept[1];
    mean = in.mean(mean, g, beta1);
    square = in.mean_of_squares(square, g, beta2);
    const double left1 = 1 - std::pow(beta1, count), left2 = 1 - std::pow(beta2, count);
    const double most = 2 / (1 - beta2) - 1;
    const double length = most - 2 * count * std::pow(beta2, count) / left2;
    if (length <= 5) return mean.div(left1);
    const double rectification =
        std::sqrt(left2 * (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length));
    return mean.mul(rectification / left1).div_(sqrt_without_infinity(square).add(o.eps));
  });
}

GradientTransformation scale_by_adadelta(ScaleByAdadeltaOptions o) {
  at_least("eps", o.eps, 0);
  require(o.rho >= 0 && o.rho < 1, "rho", o.rho, "a number of 0 or more and below 1");
  return with_moments<2>({0, 0}, o.moment_requires_grad, [o](const Tensor& g, auto kept, double, Arithmetic in) {
    Tensor &squares = *kept[0], &steps = *kept[1];
    squares = in.mean_of_squares(squares, g, o.rho);
    const Tensor update = g.mul(steps.add(o.eps).div_(squares.add(o.eps)).sqrt_());
    steps = in.mean_of_squares(steps, update, o.rho);
    return update;
  });
}

GradientTransformation scale_by_rms(ScaleByRmsOptions o) {
  at_least("eps", o.eps, 0);
  require(o.alpha >= 0 && o.alpha < 1, "alpha", o.alpha, "a number of 0 or more and below 1");
  return with_moments<1>({o.initial_scale}, false, [o](const Tensor& g, auto kept, double, Arithmetic in) {
    Tensor& square = *kept[0];
    square = in.mean_of_squares(square, g, o.alpha);
    return in.div(g, sqrt_without_infinity(square).add(o.eps));
  });
}

GradientTransformation scale_by_stddev(ScaleByStddevOptions o) {
  at_least("eps", o.eps, 0);
  require(o.alpha >= 0 && o.alpha < 1, "alpha", o.alpha, "a number of 0 or more and below 1");
  return with_moments<2>({0, o.initial_scale}, false, [o](const Tensor& g, auto kept, double, Arithmetic in) {
    Tensor &mean = *kept[0], &square = *kept[1];
    mean = in.mean(mean, g, o.alpha);
    square = in.mean_of_squares(square, g, o.alpha);
    return in.div(g, sqrt_without_infinity(square.addcmul(mean, mean, -1)).add(o.eps));
  });
}

GradientTransformation scale_by_rss(ScaleByRssOptions o) {
  at_least("eps", o.eps, 0);
  at_least("initial_accumulator_value", o.initial_accumulator_value, 0);
  return with_moments<1>({o.initial_accumulator_value}, false, [o](const Tensor& g, auto kept, double, Arithmetic in) {
    Tensor& sum = *kept[0];
    sum = in.addcmul(sum, g, g, 1);
    const Tensor update = in.div(g, sqrt_without_infinity(sum).add(o.eps));
    return at::where(sum > 0, update, 0.);
  });
}

}  // namespace muster::optim
