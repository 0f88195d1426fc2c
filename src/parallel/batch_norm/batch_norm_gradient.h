// The gradient of a batch norm's input, when the sums over the batch are known.
//
// Thread-safety: all functions.
#pragma once

#include <ATen/core/Tensor.h>

namespace muster::parallel {

// scale * (gradient - shift - (input - mean) * slope), in one pass; the other four are per channel (dimension 1), of
// the dtype in which `input` is computed with: float32 for bfloat16 and float16. The result has the dtype of `input`.
at::Tensor batch_norm_gradient(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& scale,
                               const at::Tensor& shift, const at::Tensor& mean, const at::Tensor& slope);

}  // namespace muster::parallel
