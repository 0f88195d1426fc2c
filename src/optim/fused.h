// What libtorch's fused kernels of the CPU can take: they go over the memory of a parameter, of its gradient and of
// what is kept of it as it lies, once, many parameters in one call.
//
// Thread-safety: functions of their arguments.
#pragma once

#include <ATen/core/Tensor.h>

namespace muster::optim {

// Whether the other lies in memory as the parameter does, which is contiguous.
inline bool fits(const at::Tensor& parameter, const at::Tensor& other) {
  return other.layout() == at::kStrided && other.device().is_cpu() && other.is_contiguous() && !other.is_neg() &&
         !other._is_zerotensor() && other.scalar_type() == parameter.scalar_type();
}

inline bool fusible(const at::Tensor& parameter, const at::Tensor& gradient) {
  const auto dtype = parameter.scalar_type();
  return (dtype == at::kFloat || dtype == at::kDouble) && parameter.numel() != 0 && fits(parameter, parameter) &&
         fits(parameter, gradient);
}

}  // namespace muster::optim
