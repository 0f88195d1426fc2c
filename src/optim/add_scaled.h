// parameters + factor * updates, as one node of autograd's graph for all of them. Where an update is undefined, the
// result is the parameter. Thread-safety: functions of their arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace muster::optim {

std::vector<at::Tensor> add_scaled(std::vector<at::Tensor> parameters, const std::vector<at::Tensor>& updates,
                                   double factor);

}  // namespace muster::optim
