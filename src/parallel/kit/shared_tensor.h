// Tensors in memory that the ranks of a host share, each owned by one of them. And tensors in a rank's own memory which
// operators do not use as they are, or which have memory only at times.
//
// Thread-safety: all functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "shm/mapping.h"

namespace muster::parallel {

struct Sharing {
  std::string name;           // the parameter's
  int owner = 0;              // a rank of the World, on this host
  bool is_own = false;        // whether this rank is the owner
  int first_owner = 0;        // if each host has an owner: that on the first host
  bool is_only_owner = true;  // no other host has one
  // For watch() (watched.h). `operation` is a number that all tensors of an operator get; `writes`: it changes this
  // one.
  std::function<void(uint64_t operation, bool writes)> before_use = {};
  std::function<bool()> is_here = [] { return true; };  // whether the values may be read through a pointer now
  bool is_copy = false;  // of a parameter, in another dtype or on another device: no operator may change it
  // What an operator that reads `tensor`, which has this memory, is to read instead now; undefined: the tensor itself.
  std::function<at::Tensor(const at::Tensor& tensor)> instead = {};
};
// A tensor with the shape, dtype and strides of `like` (contiguous if that is not dense), `offset` bytes into `memory`,
// which it keeps mapped.
at::Tensor shared_tensor(const std::shared_ptr<shm::Mapping>& memory, size_t offset, const at::Tensor& like,
                         Sharing sharing);
// A tensor with the memory of `tensor`, which no other rank has; for `instead` and `is_copy`.
at::Tensor private_tensor(const at::Tensor& tensor, Sharing sharing);
// A tensor on a device with the shape, dtype and strides of `like` (contiguous if that is not dense), without memory.
// Its before_use gives it some before an operator reads it.
at::Tensor tensor_without_memory(const at::Tensor& like, const at::Device& device, Sharing sharing);
// Such a tensor gets the memory of `memory`, which has its layout and is on its device; undefined: what it had goes. No
// other thread may use the tensor meanwhile.
void give_memory(const at::Tensor& tensor, const at::Tensor& memory);

const Sharing* sharing_of(const at::Tensor& tensor);  // null if shared_tensor() has not made its storage
inline bool is_shared(const at::Tensor& tensor) { return sharing_of(tensor) != nullptr; }
bool belongs_to_another_rank(const at::Tensor& tensor);  // it is shared, and this rank must not change it
bool is_spread(const at::Tensor& tensor);                // it is shared, and not every host has its values all the time
bool is_here(const at::Tensor& tensor);                  // true if it is not shared
bool may_be_watched(const at::Tensor& tensor);           // one of both functions above has made its storage
void call_before_use(const at::Tensor& tensor, uint64_t operation, bool writes);  // if it has one
at::Tensor call_instead(const at::Tensor& tensor);                                // undefined if it has none

}  // namespace muster::parallel
