// What items have in common: tensors as files hold them, numbers as tensors, and the comparison with what was saved.
//
// Thread-safety: functions without state.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/text.h"
#include "checkpoint/entry.h"
#include "muster/base/error.h"

namespace muster::checkpoint {

inline constexpr const char* kSameProgram = "Restore with the program that saved, or name another folder";
inline constexpr const char* kSameMuster = "Use the Muster that wrote the snapshot";

// InvalidArgument unless there is a form of the tensor that a file can hold: dense, contiguous, on the CPU.
void require_storable(const at::Tensor& tensor, const std::string& name);
// This form, but of a tensor on a device the tensor itself: on_host() of what is written comes later. Shares the
// tensor's memory if it can.
at::Tensor storable(const at::Tensor& tensor, const std::string& name);
at::Tensor on_host(const at::Tensor& tensor);
// Also if some of its elements are one in memory, as expand() makes them. InvalidArgument if these get unequal values.
void copy_values(at::Tensor to, at::Tensor values);
// Copies into a tensor of a module, with its dtype. What another rank owns is left to it.
void put_values(const at::Tensor& to, const at::Tensor& values);
// Whether a file's bytes of `saved` may be written into the tensor's memory as they are.
bool takes_bytes_of(const at::Tensor& saved, const at::Tensor& to);
// The same shape and dtype, on the device "meta".
at::Tensor without_values(const at::Tensor& tensor);

std::string shape_of(const at::Tensor& tensor);               // "Float [3 x 200]"
void check_fits(const Entry& saved, const at::Tensor& here);  // InvalidArgument
void check_count(const Entries& entries, size_t count);       // InvalidArgument

template <typename T>
constexpr at::ScalarType kDtype = std::is_same_v<T, double> ? at::kDouble : at::kLong;

template <typename T>
at::Tensor tensor_of(T number) {
  at::Tensor tensor = at::empty({}, kDtype<T>);
  std::memcpy(tensor.mutable_data_ptr(), &number, sizeof number);
  return tensor;
}

template <typename T>
T number_in(const Entry& entry) {
  if (entry.tensor.scalar_type() != kDtype<T> || entry.tensor.numel() != 1 || entry.tensor.is_meta())
    throw InvalidArgument(
        text("'", entry.full_name(), "' in the snapshot: expected ",
             std::is_same_v<T, double> ? "a double" : "an int64_t", ", as here, got ", shape_of(entry.tensor)),
        kSameProgram);
  T number;
  std::memcpy(&number, entry.tensor.const_data_ptr(), sizeof number);
  return number;
}

}  // namespace muster::checkpoint
