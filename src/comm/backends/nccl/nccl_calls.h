// How an operation on CUDA tensors is queued with libtorch's ProcessGroupNCCL. Included only where libtorch has NCCL.
//
// Thread-safety: pure functions; a Contiguous belongs to one thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <utility>
#include <vector>

#include "comm/core/operation.h"

namespace muster::comm::nccl_backend {

using Nccl = c10d::ProcessGroupNCCL;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Calls fn(tensor) for all tensors of an operation.
template <typename Fn>
void for_each_tensor(const Operation& operation, const Fn& fn) {
  if (operation.tensor.defined()) fn(operation.tensor);
  for (const auto* const list : {&operation.inputs, &operation.outputs})
    for (const at::Tensor& tensor : *list)
      if (tensor.defined()) fn(tensor);
}

// NCCL takes contiguous tensors. Others are copied, and what was written is copied back.
class Contiguous {
 public:
  const at::Tensor& in(const at::Tensor& tensor) { return copies_.emplace_back(tensor.contiguous()); }
  std::vector<at::Tensor> in(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> all;
    for (const at::Tensor& tensor : tensors) all.push_back(in(tensor));
    return all;
  }
  at::Tensor out(const at::Tensor& tensor) {
    if (tensor.is_contiguous()) return tensor;
    const at::Tensor copy = tensor.contiguous();
    written_.emplace_back(tensor, copy);
    return copy;
  }
  std::vector<at::Tensor> out(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> all;
    for (const at::Tensor& tensor : tensors) all.push_back(out(tensor));
    return all;
  }
  // When the operation has been queued.
  void copy_back(c10d::Work& work) {
    if (written_.empty()) return;
    const at::NoGradGuard no_grad;
    work.wait();
    for (auto& [tensor, copy] : written_) tensor.copy_(copy);
  }

 private:
  std::vector<at::Tensor> copies_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;
};

// Queues the operation. InvalidArgument if NCCL has none like it; libtorch's errors as they are.
WorkPtr queue_on(Nccl& nccl, const Operation& operation, Contiguous& contiguous);

}  // namespace muster::comm::nccl_backend
