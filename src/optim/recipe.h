// How a node of torch::autograd::Function keeps more than tensors and numbers: an object in its saved data.
// Thread-safety: none.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace muster::optim {

template <typename T>
struct Recipe : torch::CustomClassHolder {
  explicit Recipe(T given) : value(std::move(given)) {}
  T value;
};

template <typename T>
void keep(torch::autograd::AutogradContext* context, T value) {
  context->saved_data["recipe"] = c10::IValue::make_capsule(c10::make_intrusive<Recipe<T>>(std::move(value)));
}

template <typename T>
const T& kept(torch::autograd::AutogradContext* context) {
  return static_cast<Recipe<T>*>(context->saved_data["recipe"].toCapsule().get())->value;
}

// A tensor with the same value and history, or a leaf: what a function is differentiated by, apart from all other ways
// in which its results may depend on the tensor.
inline at::Tensor apart(const at::Tensor& tensor, bool with_history) {
  if (!tensor.defined() || !(tensor.is_floating_point() || tensor.is_complex())) return tensor;
  if (with_history && tensor.requires_grad()) return tensor.view_as(tensor);
  return tensor.detach().set_requires_grad(true);
}

}  // namespace muster::optim
