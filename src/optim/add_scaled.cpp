#include "optim/add_scaled.h"

#include <ATen/Dispatch.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/function.h>

#include <string>
#include <utility>

#include "autograd/graph/node.h"
#include "optim/fused.h"

namespace muster::optim {
namespace {

using at::Tensor;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

constexpr int64_t kSmall = 16384;  // elements; libtorch's operator is as fast for more, and uses several threads

// parameter + factor * update; without a parameter: factor * update. Not recorded.
Tensor sum(const Tensor* parameter, const Tensor& update, double factor) {
  const Tensor& like = parameter ? *parameter : update;
  if (like.numel() > kSmall || !fusible(like, update)) return parameter ? like.add(update, factor) : update.mul(factor);
  Tensor result = at::empty_like(like);
  AT_DISPATCH_FLOATING_TYPES(like.scalar_type(), "add_scaled", [&] {
    const auto* const a = parameter ? parameter->const_data_ptr<scalar_t>() : nullptr;
    const auto* const b = update.const_data_ptr<scalar_t>();
    auto* const to = result.mutable_data_ptr<scalar_t>();
    const auto by = static_cast<scalar_t>(factor);
    const int64_t n = like.numel();
    if (a) {
      for (int64_t i = 0; i < n; ++i) to[i] = a[i] + by * b[i];
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = by * b[i];
    }
  });
  return result;
}

class AddScaled final : public Node {
 public:
  AddScaled(edge_list edges, double factor) : Node(std::move(edges)), factor_(factor) {}

  variable_list apply(variable_list&& to) override {
    const size_t n = to.size();
    const autograd::BelowAutogradUnlessRecorded below;
    variable_list results(2 * n);
    for (size_t i = 0; i < n; ++i) {
      if (!to[i].defined()) continue;
      if (task_should_compute_output(n + i))
        results[n + i] = below.recorded() ? to[i].mul(factor_) : sum(nullptr, to[i], factor_);
      results[i] = std::move(to[i]);
    }
    return results;
  }
  std::string name() const override { return "MusterAddScaled"; }

 private:
  const double factor_;
};

// The sums, as results of one node.
variable_list recorded_sums(const variable_list& parameters, const variable_list& updates, double factor) {
  variable_list sums;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < parameters.size(); ++i) sums.push_back(sum(&parameters[i], updates[i], factor));
  }
  auto edges = torch::autograd::collect_next_edges(parameters, updates);
  const auto node = autograd::make_node<AddScaled>(std::move(edges), factor);
  for (Tensor& one : sums) torch::autograd::impl::set_gradient_edge(one, {node, node->add_input_metadata(one)});
  return sums;
}

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
      parameters[i] = sum(&parameters[i], updates[i], factor);
      continue;
    }
    chosen.push_back(parameters[i]);
    theirs.push_back(updates[i]);
    places.push_back(i);
  }
  if (places.empty()) return parameters;
  auto sums = recorded_sums(chosen, theirs, factor);
  for (size_t k = 0; k < places.size(); ++k) parameters[places[k]] = std::move(sums[k]);
  return parameters;
}

}  // namespace muster::optim
