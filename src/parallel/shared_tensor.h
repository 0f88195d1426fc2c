// Tensors in memory that the ranks of a host share, each owned by one of them.
//
// Thread-safety: all functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "shm/mapping.h"

namespace muster::parallel {

struct Sharing {
  int owner = 0;        // a rank of the World
  bool is_own = false;  // whether this rank is the owner
  // For watch() (watched.h). `operation` is a number that all tensors of an operator get; `writes`: it changes this one.
  std::function<void(uint64_t operation, bool writes)> before_use = {};
  std::function<bool()> is_here = [] { return true; };  // whether the values may be read through a pointer now
};
// A tensor with the shape, dtype and strides of `like` (contiguous if that is not dense), `offset` bytes into `memory`,
// which it keeps mapped.
at::Tensor shared_tensor(const std::shared_ptr<shm::Mapping>& memory, size_t offset, const at::Tensor& like,
                         Sharing sharing);

bool is_shared(const at::Tensor& tensor);                // whether shared_tensor() made its storage
bool belongs_to_another_rank(const at::Tensor& tensor);  // and not as this rank's own, so that it must not be changed
int owner_of(const at::Tensor& tensor);                  // -1 if it is not shared
bool is_here(const at::Tensor& tensor);                  // true if it is not shared
void call_before_use(const at::Tensor& tensor, uint64_t operation, bool writes);  // if it has one

}  // namespace muster::parallel
