// Small tensors that travel together.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "base/copy.h"

namespace muster::parallel {

// Calls change(flat) for one tensor with the elements of all tensors of each dtype, and copies what it becomes back.
// Not for sparse tensors. The order of the dtypes is the same on all ranks that give the same tensors.
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

// The bytes of small tensors in one buffer.
class CoalescedBytes {
 public:
  static constexpr size_t kMost = 64 << 10;  // bytes of a tensor
  // Tensors on the CPU whose memory is in one piece, with the same strides on all ranks.
  static bool takes(const at::Tensor& tensor) {
    return tensor.device().is_cpu() && tensor.is_non_overlapping_and_dense() && tensor.nbytes() <= kMost;
  }

  void add(const at::Tensor& tensor) {
    tensors_.push_back(tensor);
    bytes_ += static_cast<int64_t>(tensor.nbytes());
  }
  bool empty() const { return bytes_ == 0; }
  // Made by the first call, after the last add().
  const at::Tensor& buffer() {
    if (!buffer_.defined()) buffer_ = at::empty({bytes_}, at::kByte);
    return buffer_;
  }
  const at::Tensor& packed() {  // the buffer, with the tensors' bytes
    auto* at = buffer().mutable_data_ptr<uint8_t>();
    for (const at::Tensor& tensor : tensors_) {
      copy_bytes(at, tensor.const_data_ptr(), tensor.nbytes());
      at += tensor.nbytes();
    }
    return buffer_;
  }
  void unpack() const {
    const auto* at = buffer_.const_data_ptr<uint8_t>();
    for (const at::Tensor& tensor : tensors_) {
      copy_bytes(tensor.mutable_data_ptr(), at, tensor.nbytes());
      at += tensor.nbytes();
    }
  }

 private:
  std::vector<at::Tensor> tensors_;
  int64_t bytes_ = 0;
  at::Tensor buffer_;
};

}  // namespace muster::parallel
