#include "muster/optim/clip_grad.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"

namespace muster {
namespace {

using Gradients = std::vector<at::Tensor>;

// Of one device and dtype, as the operators for lists need them.
using GradientKind = std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType>;
using GradientsByKind = std::map<GradientKind, Gradients>;

GradientsByKind gradients_by_kind(at::TensorList parameters) {
  GradientsByKind all;
  std::unordered_set<const void*> seen;  // Module::parameters() has a shared parameter as often as it occurs
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (gradient.defined() && gradient.numel() > 0 && seen.insert(gradient.unsafeGetTensorImpl()).second)
      all[{gradient.device().type(), gradient.device().index(), gradient.scalar_type()}].push_back(gradient);
  }
  return all;
}

// What is wrong with the gradients; empty: nothing.
std::string defect_of(const GradientsByKind& gradients) {
  for (const auto& [kind, some] : gradients)
    for (const at::Tensor& gradient : some)
      if (gradient.layout() != at::kStrided || !at::isFloatingType(gradient.scalar_type()))
        return text("gradient: expected dense floating-point numbers, got ", gradient.scalar_type(), " of layout ",
                    gradient.layout(), " and shape ", gradient.sizes());
  return {};
}
constexpr char kDenseAlone[] = "Leave the parameter out, or make the gradient dense (of an Embedding: sparse(false))";

bool goes_as_list(const GradientKind& kind, std::optional<bool> foreach) {
  return foreach.value_or(std::get<0>(kind) == c10::DeviceType::CUDA);
}

// The norm of all of them in this process.
double norm_of(const GradientsByKind& gradients, double norm_type, std::optional<bool> foreach) {
  Gradients norms;  // of each device and dtype one, on the CPU
  for (const auto& [kind, some] : gradients) {
    const at::ScalarType dtype = std::get<2>(kind);
    const bool is_short = dtype == at::kBFloat16 || dtype == at::kHalf;
    const auto wide = is_short ? std::optional(at::kFloat) : std::nullopt;
    Gradients each;
    if (goes_as_list(kind, foreach)) {
      each = at::_foreach_norm(some, norm_type, wide);
    } else {
      for (const at::Tensor& gradient : some)
        each.push_back(at::linalg_vector_norm(gradient, norm_type, {}, false, wide));
    }
    norms.push_back(at::linalg_vector_norm(at::stack(each).to(at::kCPU, at::kDouble), norm_type));
  }
  return norms.empty() ? 0 : at::linalg_vector_norm(at::stack(norms), norm_type).item<double>();
}

// The norm over all ranks of the group, of this rank's norm. Every rank takes part, whatever it has found.
double norm_over(const Group& group, double norm, double norm_type, int copies, const std::string& defect) {
  const bool largest = std::isinf(norm_type);
  double sums[] = {largest ? norm : std::pow(norm, norm_type), defect.empty() ? 0.0 : 1.0};
  all_reduce(at::from_blob(sums, {2}, at::kDouble), {.op = largest ? ReduceOp::MAX : ReduceOp::SUM, .group = group});
  if (!defect.empty()) throw InvalidArgument("clip_grad_norm_: " + defect, kDenseAlone);
  if (sums[1] > 0)
    throw InvalidArgument("clip_grad_norm_: another rank's gradient is not dense", "Its error says which");
  return largest ? sums[0] : std::pow(sums[0] / copies, 1 / norm_type);
}

}  // namespace

double clip_grad_norm_(at::TensorList parameters, double max_norm, const ClipGradNormOptions& options) {
  const at::NoGradGuard no_grad;
  const auto require = [](bool is_right, const char* name, const char* expected, double got) {
    if (!is_right)
      throw InvalidArgument(text("clip_grad_norm_: ", name, ": expected ", expected, ", got ", got), "Change it");
  };
  require(max_norm >= 0, "max_norm", "0 or more", max_norm);
  require(options.norm_type > 0, "norm_type", "1, 2, … or infinity", options.norm_type);
  require(options.copies > 0, "copies", "1 or more", options.copies);
  GradientsByKind gradients = gradients_by_kind(parameters);
  const std::string defect = defect_of(gradients);
  double norm = defect.empty() ? norm_of(gradients, options.norm_type, options.foreach) : 0;
  if (options.sharded_over)
    norm = norm_over(*options.sharded_over, norm, options.norm_type, options.copies, defect);
  else if (!defect.empty())
    throw InvalidArgument("clip_grad_norm_: " + defect, kDenseAlone);
  if (options.error_if_nonfinite && !std::isfinite(norm))
    throw InvalidArgument(text("clip_grad_norm_: the norm of the gradients: expected a finite number, got ", norm),
                          "Look for the operation that gives NaN or inf, or leave out error_if_nonfinite");
  const double scale = max_norm / (norm + 1e-6);
  if (scale >= 1) return norm;  // not so if it is NaN
  for (auto& [kind, some] : gradients) {
    if (goes_as_list(kind, options.foreach))
      at::_foreach_mul_(some, scale);
    else
      for (at::Tensor& gradient : some) gradient.mul_(scale);
  }
  return norm;
}

void clip_grad_value_(at::TensorList parameters, double clip_value, std::optional<bool> foreach) {
  const at::NoGradGuard no_grad;
  if (!(clip_value >= 0))
    throw InvalidArgument(text("clip_grad_value_: clip_value: expected 0 or more, got ", clip_value), "Change it");
  GradientsByKind gradients = gradients_by_kind(parameters);
  if (const std::string defect = defect_of(gradients); !defect.empty())
    throw InvalidArgument("clip_grad_value_: " + defect, kDenseAlone);
  for (auto& [kind, some] : gradients) {
    if (goes_as_list(kind, foreach)) {
      at::_foreach_clamp_min_(some, -clip_value);
      at::_foreach_clamp_max_(some, clip_value);
    } else {
      for (at::Tensor& gradient : some) gradient.clamp_(-clip_value, clip_value);
    }
  }
}

}  // namespace muster
