// Tensors in memory that the ranks of a host share, each owned by one of them.
//
// Thread-safety: all functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

#include "shm/mapping.h"

namespace muster::parallel {

// A tensor with the shape, dtype and strides of `like` (contiguous if that is not dense), `offset` bytes into `memory`,
// which it keeps mapped.
at::Tensor shared_tensor(const std::shared_ptr<shm::Mapping>& memory, size_t offset, const at::Tensor& like,
                         bool is_own);

bool is_shared(const at::Tensor& tensor);                // whether shared_tensor() made its storage
bool belongs_to_another_rank(const at::Tensor& tensor);  // and not as this rank's own, so that it must not be changed

}  // namespace muster::parallel
