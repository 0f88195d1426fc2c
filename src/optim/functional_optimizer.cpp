// What all functional optimizers have in common: the table of their state, its names, and the checks.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/optim/functional_optimizer.h"
#include "optim/options.h"

namespace muster::optim {
namespace {

using at::Tensor;

void check_lists(at::TensorList parameters, at::TensorList gradients, bool sparse) {
  if (parameters.size() != gradients.size())
    throw InvalidArgument(
        text("step(): expected ", parameters.size(), " gradients, one for each parameter, got ", gradients.size()),
        "Pass an undefined tensor for a parameter that has no gradient");
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!gradients[i].defined()) continue;
    if (!parameters[i].defined()) throw InvalidArgument(text("parameter ", i, " is undefined"));
    if (parameters[i].sizes() != gradients[i].sizes())
      throw InvalidArgument(text("the gradient of parameter ", i, ": expected shape ", parameters[i].sizes(), ", got ",
                                 gradients[i].sizes()));
    if (parameters[i].is_complex() != gradients[i].is_complex())
      throw InvalidArgument(text("only one of parameter ", i, " and its gradient is complex"));
    if (gradients[i].is_sparse() && (!sparse || parameters[i].is_complex()))
      throw InvalidArgument(text("the gradient of parameter ", i, " is sparse"),
                            "Use SGD without momentum and weight decay, or Adagrad without weight decay.");
  }
}

}  // namespace

Tensor as_real(const Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor; }

FunctionalOptimizer::FunctionalOptimizer(double lr, std::vector<std::string> names)
    : lr_(at_least("lr", lr, 0)), names_(std::move(names)) {
  if (names_.size() > std::tuple_size_v<decltype(ParameterState::kept)>)
    throw InvalidArgument("an optimizer keeps at most three tensors per parameter");
}

void FunctionalOptimizer::set_lr(double lr) { lr_.store(at_least("lr", lr, 0), std::memory_order_relaxed); }

FunctionalOptimizer::Known& FunctionalOptimizer::known(const Tensor& parameter) {
  auto& place = table_[parameter.unsafeGetTensorImpl()];
  if (!place) place = std::make_unique<Known>(Known{parameter, {}});
  return *place;
}

void FunctionalOptimizer::step(at::TensorList parameters, at::TensorList gradients) {
  require_steppable(parameters, gradients);
  std::vector<ParameterState*> states(parameters.size());
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < parameters.size(); ++i)
      if (gradients[i].defined()) states[i] = &known(parameters[i]).state;
  }
  step(parameters, gradients, states);
}

void FunctionalOptimizer::require_steppable(at::TensorList parameters, at::TensorList gradients) const {
  check_lists(parameters, gradients, takes_sparse());
  for (size_t i = 0; i < parameters.size(); ++i)
    if (gradients[i].defined()) check(parameters[i]);
}

void FunctionalOptimizer::step(at::TensorList parameters, at::TensorList gradients,
                               const std::vector<ParameterState*>& states) const {
  const at::NoGradGuard no_grad;
  std::vector<Item> items;
  items.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i)
    if (gradients[i].defined()) items.push_back({as_real(parameters[i]), as_real(gradients[i]), states[i]});
  update_all(lr(), items);
}

void FunctionalOptimizer::update_all(double lr, std::vector<Item>& items) const {
  for (Item& item : items) update_one(lr, item);
}

Tensor FunctionalOptimizer::empty_kept(size_t, const Tensor& parameter) const { return at::empty_like(parameter); }

void FunctionalOptimizer::update_one(double lr, Item& item) const {
  ++item.state->step;
  update(lr, item.parameter, item.gradient, *item.state);
}

FunctionalOptimizer::State FunctionalOptimizer::state(at::TensorList parameters) const {
  const at::NoGradGuard no_grad;
  State all;
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto found = table_.find(parameters[i].unsafeGetTensorImpl());
    if (found == table_.end()) continue;
    const ParameterState& state = found->second->state;
    all[text(i, ".step")] = at::scalar_tensor(state.step, at::kLong);
    for (size_t k = 0; k < names_.size(); ++k)
      if (state.kept[k].defined()) all[text(i, ".", names_[k])] = state.kept[k].clone();
  }
  return all;
}

void FunctionalOptimizer::load_state(at::TensorList parameters, const State& state) {
  const at::NoGradGuard no_grad;
  std::map<size_t, ParameterState> read;
  std::set<size_t> with_step;
  for (const auto& [name, tensor] : state) {
    size_t i = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), i);
    const std::string rest(end, name.data() + name.size());
    const auto which = std::find_if(names_.begin(), names_.end(), [&](const auto& one) { return rest == "." + one; });
    if (error != std::errc() || i >= parameters.size() || (rest != ".step" && which == names_.end()))
      throw InvalidArgument(text("this optimizer of ", parameters.size(), " parameters has no state '", name, "'"),
                            "A name is the parameter's index, a point, and one of: " + join(names_) +
                                (names_.empty() ? "step." : ", step."));
    const bool is_step = rest == ".step";
    const auto index = static_cast<size_t>(which - names_.begin());
    const Tensor like = is_step ? Tensor() : empty_kept(index, as_real(parameters[i]));
    const auto expected = is_step ? std::vector<int64_t>{} : like.sizes().vec();
    if (!tensor.defined() || (tensor.sizes() != expected && !(is_step && tensor.numel() == 1)))
      throw InvalidArgument(text("'", name, "': expected shape ", at::IntArrayRef(expected), ", got ",
                                 tensor.defined() ? text(tensor.sizes()) : "no tensor"));
    if (is_step) {
      read[i].step = tensor.to(at::kLong).item<int64_t>();
      with_step.insert(i);
    } else {
      read[i].kept[index] = tensor.to(like.options(), /*non_blocking=*/false, /*copy=*/true);
    }
  }
  for (const auto& [i, one] : read)
    if (!with_step.contains(i)) throw InvalidArgument(text("'", i, ".step' is missing"));
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto found = read.find(i);
    const std::lock_guard lock(mutex_);
    if (found != read.end()) {
      known(parameters[i]).state = std::move(found->second);
    } else {
      table_.erase(parameters[i].unsafeGetTensorImpl());
    }
  }
}

}  // namespace muster::optim
