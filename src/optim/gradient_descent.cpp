// SGD, ASGD, Adagrad, Adadelta, RMSprop, Rprop. Source: torch/optim/sgd.py and so on. The order of the operations is
// theirs, so that the results are equal to the bit. If libtorch's fused kernels can take the tensors of SGD and
// Adagrad, the results are those of fused=True.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "muster/optim/functional_optimizer.h"
#include "optim/fused.h"
#include "optim/options.h"

namespace muster::optim {
namespace {

using at::Tensor;

SGDOptions checked(SGDOptions options) {
  at_least("momentum", options.momentum, 0);
  at_least("weight_decay", options.weight_decay, 0);
  if (options.nesterov && (options.momentum <= 0 || options.dampening != 0))
    throw InvalidArgument("nesterov needs a momentum above 0 and a dampening of 0");
  return options;
}
AdagradOptions checked(AdagradOptions options) {
  at_least("lr_decay", options.lr_decay, 0);
  at_least("weight_decay", options.weight_decay, 0);
  at_least("initial_accumulator_value", options.initial_accumulator_value, 0);
  at_least("eps", options.eps, 0);
  return options;
}
AdadeltaOptions checked(AdadeltaOptions options) {
  require(options.rho >= 0 && options.rho <= 1, "rho", options.rho, "a number from 0 to 1");
  at_least("eps", options.eps, 0);
  at_least("weight_decay", options.weight_decay, 0);
  return options;
}
ASGDOptions checked(ASGDOptions options) {
  at_least("weight_decay", options.weight_decay, 0);
  return options;
}
RMSpropOptions checked(RMSpropOptions options) {
  at_least("alpha", options.alpha, 0);
  at_least("eps", options.eps, 0);
  at_least("weight_decay", options.weight_decay, 0);
  at_least("momentum", options.momentum, 0);
  return options;
}
RpropOptions checked(RpropOptions options) {
  require(options.etas.first > 0 && options.etas.first < 1, "etas.first", options.etas.first,
          "a number above 0 and below 1");
  require(options.etas.second > 1, "etas.second", options.etas.second, "a number above 1");
  require(options.step_sizes.first <= options.step_sizes.second, "step_sizes.first", options.step_sizes.first,
          "no more than step_sizes.second");
  return options;
}

// The gradient of the value to be minimized, with the weight decay added.
Tensor downhill(const Tensor& gradient, bool maximize, double weight_decay, const Tensor& parameter) {
  const Tensor used = maximize ? -gradient : gradient;
  return weight_decay != 0 ? used.add(parameter, weight_decay) : used;
}

Tensor& begun(Tensor& kept, const Tensor& like) {
  if (!kept.defined()) kept = at::zeros_like(like);
  return kept;
}

}  // namespace

SGD::SGD(Options options) : FunctionalOptimizer(options.lr, {"momentum_buffer"}), options_(checked(options)) {}
void SGD::update(double lr, Tensor& parameter, const Tensor& given, ParameterState& state) const {
  Tensor gradient = downhill(given, options_.maximize, options_.weight_decay, parameter);
  if (options_.momentum != 0) {
    Tensor& buffer = state.kept[0];
    if (!buffer.defined())
      buffer = gradient.detach().clone();
    else
      buffer.mul_(options_.momentum).add_(gradient, 1 - options_.dampening);
    gradient = options_.nesterov ? gradient.add(buffer, options_.momentum) : buffer;
  }
  parameter.add_(gradient, -lr);
}

void SGD::update_all(double lr, std::vector<Item>& items) const {
  struct Group {
    std::vector<Tensor> parameters, gradients, buffers;
    std::vector<ParameterState*> states;
    StepCounter counter;
  };
  std::map<FusedKey<bool>, Group> groups;             // by whether buffers exist already
  std::unordered_set<const ParameterState*> waiting;  // in the groups
  const bool has_momentum = options_.momentum != 0;
  const auto step_groups = [&] {
    for (auto& [key, group] : groups) {
      at::_fused_sgd_(group.parameters, group.gradients, group.buffers, options_.weight_decay, options_.momentum, lr,
                      options_.dampening, options_.nesterov, options_.maximize, /*is_first_step=*/!std::get<bool>(key));
      group.counter.made();
      for (const auto* written : {&group.parameters, &group.buffers}) mark_written(*written);
      for (size_t i = 0; i < group.buffers.size(); ++i) group.states[i]->kept[0] = group.buffers[i];
    }
    groups.clear();
    waiting.clear();
  };
  for (Item& item : items) {
    const Tensor& parameter = item.parameter;
    const Tensor& buffer = item.state->kept[0];
    // It may be in the list twice. Then its buffer would be made twice, and a kernel of CUDA would make both steps at
    // the same time.
    const bool makes_buffer = has_momentum && !buffer.defined();
    if ((makes_buffer || parameter.is_cuda()) && !waiting.insert(item.state).second) {
      step_groups();
      waiting.insert(item.state);
    }
    if (!fusible(parameter, item.gradient) || (buffer.defined() && !fits(parameter, buffer))) {
      update_one(lr, item);
      continue;
    }
    Group& group = groups[fused_key(parameter, !has_momentum || buffer.defined())];
    group.parameters.push_back(parameter);
    group.gradients.push_back(item.gradient);
    if (has_momentum) group.buffers.push_back(buffer.defined() ? buffer : at::empty_like(parameter));
    group.states.push_back(item.state);
    group.counter.count(*item.state);
  }
  step_groups();
}

// `ax`, an average of the parameters from step t0 on, is what the optimizer gives in the end.
ASGD::ASGD(Options options) : FunctionalOptimizer(options.lr, {"ax", "eta", "mu"}), options_(checked(options)) {}
void ASGD::update(double lr, Tensor& parameter, const Tensor& given, ParameterState& state) const {
  auto& [average, eta, mu] = state.kept;
  if (!average.defined()) average = at::zeros_like(parameter);
  if (!eta.defined()) eta = at::scalar_tensor(lr, at::kFloat);
  if (!mu.defined()) mu = at::scalar_tensor(1, at::kFloat);
  const Tensor gradient = downhill(given, options_.maximize, options_.weight_decay, parameter);
  const double rate = eta.item<double>();
  parameter.mul_(1 - options_.lambd * rate);
  parameter.add_(gradient, -rate);
  if (mu.item<double>() == 1)
    average.copy_(parameter);
  else
    average.add_(parameter.sub(average).mul_(mu));
  const auto step = static_cast<double>(state.step);
  eta.fill_(lr / std::pow(1 + options_.lambd * lr * step, options_.alpha));
  mu.fill_(1 / std::max(1.0, step - options_.t0));
}
Tensor ASGD::empty_kept(size_t index, const Tensor& parameter) const {
  return index == 0 ? at::empty_like(parameter) : at::empty({}, at::kFloat);
}

Adagrad::Adagrad(Options options) : FunctionalOptimizer(options.lr, {"sum"}), options_(checked(options)) {}
void Adagrad::update(double lr, Tensor& parameter, const Tensor& given, ParameterState& state) const {
  Tensor& sum = state.kept[0];
  if (!sum.defined()) sum = at::full_like(parameter, options_.initial_accumulator_value);
  Tensor gradient = downhill(given, options_.maximize, options_.weight_decay, parameter);
  const double now = lr / (1 + static_cast<double>(state.step - 1) * options_.lr_decay);
  if (!gradient.is_sparse()) {
    sum.addcmul_(gradient, gradient, 1);
    parameter.addcdiv_(gradient, sum.sqrt().add_(options_.eps), -now);
    return;
  }
  gradient = gradient.coalesce();  // values of one index must be added before they are squared
  const Tensor indices = gradient._indices(), values = gradient._values();
  if (values.numel() == 0) return;
  const auto sparse = [&](const Tensor& of) { return at::_sparse_coo_tensor_unsafe(indices, of, gradient.sizes()); };
  sum.add_(sparse(values.pow(2)));
  const Tensor roots = sum.sparse_mask(gradient)._values().sqrt().add_(options_.eps);
  parameter.add_(sparse(values / roots), -now);
}

void Adagrad::update_all(double lr, std::vector<Item>& items) const {
  struct Group {
    std::vector<Tensor> parameters, gradients, sums, steps;
    StepCounter counter;
  };
  std::map<FusedKey<int64_t>, Group> groups;
  for (Item& item : items) {
    Tensor& sum = item.state->kept[0];
    if (!fusible(item.parameter, item.gradient) || (sum.defined() && !fits(item.parameter, sum))) {
      update_one(lr, item);
      continue;
    }
    if (!sum.defined()) sum = at::full_like(item.parameter, options_.initial_accumulator_value);
    const int64_t step = item.state->step + 1;
    Group& group = groups[fused_key(item.parameter, step)];
    group.parameters.push_back(item.parameter);
    group.gradients.push_back(item.gradient);
    group.sums.push_back(sum);
    group.steps.push_back(group.steps.empty() ? step_number(step, item.parameter) : group.steps.front());
    group.counter.count(*item.state);
  }
  for (auto& [key, group] : groups) {
    at::_fused_adagrad_(group.parameters, group.gradients, group.sums, group.steps, lr, options_.lr_decay,
                        options_.weight_decay, options_.eps, options_.maximize);
    group.counter.made();
    for (const auto* written : {&group.parameters, &group.sums}) mark_written(*written);
  }
}

Adadelta::Adadelta(Options options)
    : FunctionalOptimizer(options.lr, {"square_avg", "acc_delta"}), options_(checked(options)) {}
void Adadelta::update(double lr, Tensor& parameter, const Tensor& given, ParameterState& state) const {
  const Tensor gradient = downhill(given, options_.maximize, options_.weight_decay, parameter);
  Tensor &squares = begun(state.kept[0], parameter), &deltas = begun(state.kept[1], parameter);
  squares.mul_(options_.rho).addcmul_(gradient, gradient, 1 - options_.rho);
  const Tensor root = squares.add(options_.eps).sqrt_();
  const Tensor delta = deltas.add(options_.eps).sqrt_().div_(root).mul_(gradient);
  deltas.mul_(options_.rho).addcmul_(delta, delta, 1 - options_.rho);
  parameter.add_(delta, -lr);
}

RMSprop::RMSprop(Options options)
    : FunctionalOptimizer(options.lr, {"square_avg", "momentum_buffer", "grad_avg"}), options_(checked(options)) {}
void RMSprop::update(double lr, Tensor& parameter, const Tensor& given, ParameterState& state) const {
  const Tensor gradient = downhill(given, options_.maximize, options_.weight_decay, parameter);
  Tensor& squares = begun(state.kept[0], parameter);
  squares.mul_(options_.alpha).addcmul_(gradient, gradient, 1 - options_.alpha);
  Tensor below;
  if (options_.centered) {
    Tensor& average = begun(state.kept[2], parameter);
    average.lerp_(gradient, 1 - options_.alpha);
    below = squares.addcmul(average, average, -1).sqrt_();
  } else {
    below = squares.sqrt();
  }
  below.add_(options_.eps);
  if (options_.momentum > 0) {
    Tensor& buffer = begun(state.kept[1], parameter);
    buffer.mul_(options_.momentum).addcdiv_(gradient, below);
    parameter.add_(buffer, -lr);
  } else {
    parameter.addcdiv_(gradient, below, -lr);
  }
}

Rprop::Rprop(Options options) : FunctionalOptimizer(options.lr, {"prev", "step_size"}), options_(checked(options)) {}
void Rprop::update(double lr, Tensor& parameter, const Tensor& given, ParameterState& state) const {
  Tensor gradient = options_.maximize ? -given : given;
  Tensor &before = begun(state.kept[0], parameter), &size = state.kept[1];
  if (!size.defined()) size = at::full_like(parameter, lr);
  const Tensor product = gradient.mul(before);
  const Tensor turned = product.lt(0);
  Tensor factor = at::full_like(parameter, 1.0);
  factor.masked_fill_(product.gt(0), options_.etas.second).masked_fill_(turned, options_.etas.first);
  size.mul_(factor).clamp_(options_.step_sizes.first, options_.step_sizes.second);
  gradient = gradient.masked_fill(turned, 0);  // no step where the sign has changed, nor a sign for the next
  parameter.addcmul_(gradient.sign(), size, -1);
  before.copy_(gradient);
}

}  // namespace muster::optim
