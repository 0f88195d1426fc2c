// What the writer and the reader of a table of tensors share: the row's flags, which dtypes travel, and how a storage
// keeps the memory of a received piece.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace muster::rpc::detail {

inline constexpr uint8_t kDefined = 1, kRequiresGrad = 2, kStrided = 4, kPlaced = 8, kQuantized = 16;
inline constexpr uint8_t kKnownFlags = kDefined | kRequiresGrad | kStrided | kPlaced | kQuantized;
inline constexpr size_t kMostDims = 64;  // of a tensor that travels

// Whether tensors have this dtype, whose elements are whole bytes with a meaning of their own: not quantized ones
// (quantized.h).
inline bool travels(at::ScalarType dtype) {
  return static_cast<uint8_t>(dtype) < static_cast<uint8_t>(at::ScalarType::Undefined) && !at::isQIntType(dtype);
}

// The deleter of a storage whose memory a piece's owner keeps.
inline void release_owner(void* context) { delete static_cast<std::shared_ptr<void>*>(context); }

}  // namespace muster::rpc::detail
