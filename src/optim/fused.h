// Tells whether libtorch's fused CPU kernels can take a parameter. These kernels take many parameters in one call. They
// go once through the memory of each parameter, of its gradient and of its state, without regard to strides.
//
// Thread-safety: functions of their arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "muster/optim/functional_optimizer.h"

namespace muster::optim {

// True if `other` has the same layout in memory as the parameter, which is contiguous.
inline bool fits(const at::Tensor& parameter, const at::Tensor& other) {
  return other.layout() == at::kStrided && other.device().is_cpu() && other.is_contiguous() && !other.is_neg() &&
         !other._is_zerotensor() && other.scalar_type() == parameter.scalar_type() &&
         other.sizes() == parameter.sizes();
}

inline bool fusible(const at::Tensor& parameter, const at::Tensor& gradient) {
  const auto dtype = parameter.scalar_type();
  return (dtype == at::kFloat || dtype == at::kDouble) && parameter.numel() != 0 && fits(parameter, parameter) &&
         fits(parameter, gradient);
}

// Bumps the versions of tensors that a kernel has written, because the kernel does not. An autograd graph that has saved
// the old values must notice the change.
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
