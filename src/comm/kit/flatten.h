// Tensors as plain memory: makes the tensors of an operation contiguous, and copies results back to outputs that were
// not.
//
// Thread-safety: none.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <utility>
#include <vector>

#include "comm/core/bytes.h"

namespace muster::comm {

// For a thread of a backend that writes to users' tensors through operators. Autograd sees nothing of it, as where it
// writes through pointers. Otherwise a tensor of inference mode, which is a mode of the user's thread, could not be
// written.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// Not const_data_ptr(): a lazy copy gets its own memory only now.
inline Bytes data_of(const at::Tensor& tensor) { return static_cast<Bytes>(tensor.mutable_data_ptr()); }

class Flatten {
 public:
  at::Tensor input(const at::Tensor& tensor) { return tensor.is_contiguous() ? tensor : tensor.contiguous(); }
  // For tensors that are only written.
  at::Tensor output(const at::Tensor& tensor) {
    if (tensor.is_contiguous()) return tensor;
    at::Tensor flat = at::empty_like(tensor, at::MemoryFormat::Contiguous);
    back_.emplace_back(tensor, flat);
    return flat;
  }
  at::Tensor in_place(const at::Tensor& tensor) {
    if (tensor.is_contiguous()) return tensor;
    at::Tensor flat = tensor.contiguous();
    back_.emplace_back(tensor, flat);
    return flat;
  }
  std::vector<at::Tensor> inputs(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> flat;
    for (const auto& tensor : tensors) flat.push_back(input(tensor));
    return flat;
  }
  std::vector<at::Tensor> outputs(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> flat;
    for (const auto& tensor : tensors) flat.push_back(output(tensor));
    return flat;
  }

  void copy_back() {
    const BelowAutograd below;
    for (const auto& [tensor, flat] : back_) tensor.copy_(flat);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;
};

}  // namespace muster::comm
