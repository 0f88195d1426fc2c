// Tensors of an operation as bytes: one pointer per rank, whether the caller gave a list or one tensor for all.
//
// Thread-safety: pure functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/copy.h"
#include "comm/bytes.h"

namespace muster::comm {

// A pointer for each rank of a group. The common case does not allocate.
template <typename Pointer>
class PerRank {
 public:
  explicit PerRank(size_t ranks) : ranks_(ranks), many_(ranks > few_.size() ? ranks : 0) {}
  std::span<Pointer> span() { return many_.empty() ? std::span(few_).first(ranks_) : std::span(many_); }
  Pointer& operator[](size_t rank) { return span()[rank]; }

 private:
  size_t ranks_;
  std::array<Pointer, 64> few_;
  std::vector<Pointer> many_;
};

inline Bytes data_of(const at::Tensor& tensor) { return static_cast<Bytes>(tensor.mutable_data_ptr()); }

// Pointers to each rank's part of contiguous tensors: one tensor per rank, or one with room for all.
template <typename Pointer>
std::vector<Pointer> parts_of(const std::vector<at::Tensor>& tensors, size_t ranks, size_t bytes_each) {
  std::vector<Pointer> pointers;
  if (tensors.empty()) return pointers;
  for (size_t r = 0; r < ranks; ++r)
    pointers.push_back(tensors.size() == 1 && ranks > 1 ? data_of(tensors[0]) + r * bytes_each : data_of(tensors[r]));
  return pointers;
}

// One side of an all_to_all: where each rank's part begins and how long it is.
template <typename Pointer>
void cut(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& splits, size_t ranks,
         std::vector<Pointer>& pointers, std::vector<uint64_t>& sizes) {
  if (tensors.size() == ranks && ranks > 1) {
    for (const auto& tensor : tensors) {
      pointers.push_back(data_of(tensor));
      sizes.push_back(tensor.nbytes());
    }
    return;
  }
  const at::Tensor& tensor = tensors[0];
  const auto total = static_cast<uint64_t>(tensor.nbytes());
  const uint64_t row = splits.empty() || tensor.size(0) == 0 ? 0 : total / static_cast<uint64_t>(tensor.size(0));
  Bytes at = data_of(tensor);
  for (size_t r = 0; r < ranks; ++r) {
    pointers.push_back(at);
    sizes.push_back(splits.empty() ? total / ranks : static_cast<uint64_t>(splits[r]) * row);
    at += sizes.back();
  }
}

}  // namespace muster::comm
