// The memory of tensors, for code that does not use tensors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace muster::comm {

using Bytes = std::byte*;
using ConstBytes = const std::byte*;

inline constexpr uint64_t kNotOnHeap = ~uint64_t{0};  // in place of an offset on a rank's heap

}  // namespace muster::comm
