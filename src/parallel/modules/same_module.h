// What the ranks' copies of one module have in common: that they are the same module, and rank 0's values.
//
// Thread-safety: none; every rank of the group calls these functions in the same order.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include "muster/comm/group.h"

namespace muster::parallel {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

struct ModuleTensors {
  std::vector<NamedTensor> all;         // parameters and buffers, shared ones as often as they occur
  std::vector<NamedTensor> parameters;  // each once, by its first name
  std::vector<NamedTensor> buffers;

  std::vector<NamedTensor> trainable() const;  // of `parameters`, those that require gradients
};
ModuleTensors tensors_of(const torch::nn::Module& module);

// Throws Mismatch on every rank if a rank differs from rank 0 in a tensor's name, dtype, shape, strides, whether it is
// trained, with which earlier tensor it is shared, or in `options`. Names the first difference.
void require_same_on_all_ranks(const std::vector<NamedTensor>& tensors, const std::string& options, const Group& group);
// InvalidArgument if two of the tensors lie in the same memory: given new memory, they would lie in two.
void require_own_memory(const std::vector<NamedTensor>& tensors);
// As tensor.set_data(values), also if that is on another device.
void give_values(const at::Tensor& tensor, const at::Tensor& values);
// Throws InvalidArgument on every rank if a rank has no values of a tensor now (gather() would get them).
void require_values_on_all_ranks(const std::vector<NamedTensor>& tensors, const Group& group);
// All ranks throw, or none: what has failed on this rank, or "rank 2 <what>", for example "could not …", as Unavailable
// if a rank has thrown this, else as InvalidArgument.
void throw_if_any_failed(const std::exception_ptr& failure, const Group& group, const char* what);
// Copies rank root's values to all, if they are not on the device "meta". Small tensors travel together, in one
// broadcast.
void broadcast_together(const std::vector<NamedTensor>& tensors, const Group& group, int root = 0);

}  // namespace muster::parallel
