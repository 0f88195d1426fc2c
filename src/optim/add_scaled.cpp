#include "optim/add_scaled.h"

#include <ATen/Dispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "optim/fused.h"

namespace muster::optim {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kSmall = 16384;  // elements; libtorch's operator is as fast for more, and uses several threads

Tensor sum(const Tensor& parameter, const Tensor& update, double factor) {
  if (parameter.numel() > kSmall || !fusible(parameter, update)) return parameter.add(update, factor);
  Tensor result = at::empty_like(parameter);
  AT_DISPATCH_FLOATING_TYPES(parameter.scalar_type(), "add_scaled", [&] {
    const auto* const a = parameter.const_data_ptr<scalar_t>();
    const auto* const b = update.const_data_ptr<scalar_t>();
    auto* const to = result.mutable_data_ptr<scalar_t>();
    const auto by = static_cast<scalar_t>(factor);
    for (int64_t i = 0, n = parameter.numel(); i < n; ++i) to[i] = a[i] + by * b[i];
  });
  return result;
}

class AddScaled : public torch::autograd::Function<AddScaled> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList parameters, at::TensorList updates,
                               double factor) {
    context->set_materialize_grads(false);
    context->saved_data["factor"] = factor;
    variable_list results;
    for (size_t i = 0; i < parameters.size(); ++i) results.push_back(sum(parameters[i], updates[i], factor));
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& to) {
    const double factor = context->saved_data["factor"].toDouble();
    variable_list results = to;
    for (const Tensor& one : to) results.push_back(one.defined() ? one.mul(factor) : Tensor());
    results.emplace_back();  // the factor's
    return results;
  }
};

// Whether the sum has the parameter's shape and dtype, so that gradients need no reduction.
bool alike(const Tensor& parameter, const Tensor& update) {
  return parameter.layout() == at::kStrided && update.layout() == at::kStrided &&
         parameter.scalar_type() == update.scalar_type() && !parameter.is_complex() &&
         parameter.sizes() == update.sizes() && parameter.device() == update.device();
}

}  // namespace

variable_list add_scaled(variable_list parameters, const variable_list& updates, double factor) {
  variable_list chosen, theirs;
  std::vector<size_t> places;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!updates[i].defined()) continue;
    const bool recorded = at::GradMode::is_enabled() && (parameters[i].requires_grad() || updates[i].requires_grad());
    if (!alike(parameters[i], updates[i])) {
      parameters[i] = parameters[i].add(updates[i], factor);
      continue;
    }
    if (!recorded) {
      parameters[i] = sum(parameters[i], updates[i], factor);
      continue;
    }
    chosen.push_back(parameters[i]);
    theirs.push_back(updates[i]);
    places.push_back(i);
  }
  if (places.empty()) return parameters;
  auto sums = AddScaled::apply(at::TensorList(chosen), at::TensorList(theirs), factor);
  for (size_t k = 0; k < places.size(); ++k) parameters[places[k]] = std::move(sums[k]);
  return parameters;
}

}  // namespace muster::optim
