// Gradients by central differences, to compare autograd's with.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <vector>

namespace muster::test {

// Of a function of double tensors that returns one number.
inline std::vector<at::Tensor> finite_differences(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& of,
                                                  const std::vector<at::Tensor>& at, double step = 1e-6) {
  std::vector<at::Tensor> inputs, gradients;
  for (const auto& one : at) inputs.push_back(one.detach().clone());
  const auto value = [&] {  // each time from leaves of its own, since the function may differentiate
    std::vector<at::Tensor> leaves;
    for (const auto& one : inputs) leaves.push_back(one.clone().set_requires_grad(true));
    return of(leaves).item<double>();
  };
  for (auto& input : inputs) {
    auto gradient = at::zeros_like(input);
    for (int64_t i = 0; i < input.numel(); ++i) {
      double& element = input.data_ptr<double>()[i];
      const double before = element;
      element = before + step;
      const double above = value();
      element = before - step;
      const double below = value();
      element = before;
      gradient.data_ptr<double>()[i] = (above - below) / (2 * step);
    }
    gradients.push_back(gradient);
  }
  return gradients;
}

}  // namespace muster::test
