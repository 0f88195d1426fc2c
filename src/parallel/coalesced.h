// Tensors that travel together.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <cstdint>
#include <map>
#include <vector>

namespace muster::parallel {

// Calls change(flat) for one tensor with the elements of all tensors of each dtype, and copies what it becomes back. Not for
// sparse tensors. The order of the dtypes is the same on all ranks that give the same tensors.
void change_coalesced(const std::vector<at::Tensor>& tensors, const auto& change) {
  const at::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (const at::Tensor& tensor : tensors) by_dtype[tensor.scalar_type()].push_back(tensor);
  for (const auto& [dtype, list] : by_dtype) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& tensor : list) flat.push_back(tensor.detach().reshape({-1}));
    const at::Tensor all = at::cat(flat);
    change(all);
    int64_t offset = 0;
    for (const at::Tensor& tensor : list) {
      tensor.copy_(all.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
  }
}

}  // namespace muster::parallel
