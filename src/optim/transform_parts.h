// What the transformations of transform.h are made of. Thread-safety: functions of their arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "muster/optim/transform.h"

namespace muster::optim {

// Each formula is written once, for results in new tensors and for results in the first argument.
struct Arithmetic {
  bool inplace;

  template <typename Factor>  // a number or a tensor
  at::Tensor mul(const at::Tensor& a, const Factor& by) const {
    return inplace ? at::Tensor(a).mul_(by) : a.mul(by);
  }
  at::Tensor div(const at::Tensor& a, const at::Tensor& by) const {
    return inplace ? at::Tensor(a).div_(by) : a.div(by);
  }
  at::Tensor add(const at::Tensor& a, const at::Tensor& b, double times = 1) const {
    return inplace ? at::Tensor(a).add_(b, times) : a.add(b, times);
  }
  at::Tensor addcmul(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, double times) const {
    return inplace ? at::Tensor(a).addcmul_(b, c, times) : a.addcmul(b, c, times);
  }
  // decay * mean + (1 - decay) * x, and of x². A new tensor of our own may always be changed.
  at::Tensor mean(const at::Tensor& mean, const at::Tensor& x, double decay) const {
    return mul(mean, decay).add_(x, 1 - decay);
  }
  at::Tensor mean_of_squares(const at::Tensor& mean, const at::Tensor& x, double decay) const {
    return mul(mean, decay).addcmul_(x, x, 1 - decay);
  }
};

// -g with maximize, plus weight_decay * parameter.
GradientTransformation decayed(double weight_decay, bool maximize);

// Throws InvalidArgument unless the state has a count and `kinds` tensors for each update.
void check_state(const OptState& state, const Tensors& updates, size_t kinds);

}  // namespace muster::optim
