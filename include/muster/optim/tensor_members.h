// For module classes that keep registered tensors in member variables, so that muster/optim/meta.h can replace them.
//
// Thread-safety: that of the module.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace muster::optim {

//   struct Scale : torch::nn::Module, muster::optim::TensorMembers {
//     torch::Tensor by;
//     Scale() { by = register_parameter("by", torch::ones({1})); }
//     std::vector<at::Tensor*> tensor_members() override { return {&by}; }
//   };
class TensorMembers {
 public:
  virtual ~TensorMembers() = default;
  virtual std::vector<at::Tensor*> tensor_members() = 0;
};

}  // namespace muster::optim
