// What the writer and the reader of a table of tensors share: the row's flags, which dtypes travel, and how a storage
// keeps the memory of a received piece.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace muster::rpc::detail {

inline constexpr uint8_t kDefined = 1, kRequiresGrad = 2, kStrided = 4, kPlaced = 8;
inline constexpr uint8_t kKnownFlags = kDefined | kRequiresGrad | kStrided | kPlaced;
inline constexpr size_t kMostDims = 64;  // libtorch's own limit

// True for dtypes whose elements are bytes with a meaning of their own: not quantized ones, nor parts of bytes.
inline bool travels(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kUInt16:
    case at::kUInt32:
    case at::kUInt64:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexHalf:
    case at::kComplexFloat:
    case at::kComplexDouble:
    case at::kBool:
    case at::kFloat8_e5m2:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2fnuz:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e8m0fnu:
      return true;
    default:
      return false;
  }
}

// The deleter of a storage whose memory a piece's owner keeps.
inline void release_owner(void* context) { delete static_cast<std::shared_ptr<void>*>(context); }

}  // namespace muster::rpc::detail
