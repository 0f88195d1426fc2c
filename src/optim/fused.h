// Tells whether libtorch's fused kernels for the CPU and for CUDA can take a parameter. These kernels take many
// parameters in one call. They go once through the memory of each parameter, of its gradient and of its state, without
// regard to strides.
//
// Thread-safety: functions of their arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "muster/optim/functional_optimizer.h"

namespace muster::optim {

// True if `other` has the same layout in memory as the parameter, which is contiguous.
inline bool fits(const at::Tensor& parameter, const at::Tensor& other) {
  return other.layout() == at::kStrided && other.device() == parameter.device() && other.is_contiguous() &&
         !other.is_neg() && !other._is_zerotensor() && other.scalar_type() == parameter.scalar_type() &&
         other.sizes() == parameter.sizes();
}

inline bool fusible(const at::Tensor& parameter, const at::Tensor& gradient) {
  const auto dtype = parameter.scalar_type();
  const bool has_kernel = parameter.is_cpu() ? dtype == at::kFloat || dtype == at::kDouble
                                             : parameter.is_cuda() && at::isFloatingType(dtype);
  return has_kernel && parameter.numel() != 0 && fits(parameter, parameter) && fits(parameter, gradient);
}

// What one call of a kernel has in common, apart from `more`: dtype and device.
template <typename More>
using FusedKey = std::tuple<at::ScalarType, c10::DeviceType, c10::DeviceIndex, More>;
template <typename More>
FusedKey<More> fused_key(const at::Tensor& parameter, More more) {
  return {parameter.scalar_type(), parameter.device().type(), parameter.device().index(), more};
}

// The number of a step for a kernel, which reads it as a float where the parameter is.
inline at::Tensor step_number(int64_t step, const at::Tensor& parameter) {
  return parameter.is_cpu() ? at::scalar_tensor(step, at::kFloat)
                            : at::full({}, step, at::TensorOptions(at::kFloat).device(parameter.device()));
}

// Bumps the versions of tensors that a kernel has written, because the kernel does not. An autograd graph that has
// saved the old values must notice the change.
inline void mark_written(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors)
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Counts steps, and takes those back that were not made because something threw.
class StepCounter {
 public:
  StepCounter() = default;
  StepCounter(const StepCounter&) = delete;
  StepCounter& operator=(const StepCounter&) = delete;
  ~StepCounter() {
    for (ParameterState* const state : states_) --state->step;
  }
  void count(ParameterState& state) {
    ++state.step;
    states_.push_back(&state);
  }
  void made() { states_.clear(); }

 private:
  std::vector<ParameterState*> states_;
};

}  // namespace muster::optim
