// The memory of tensors, for code that does not use tensors.
#pragma once

#include <cstddef>

namespace muster::comm {

using Bytes = std::byte*;
using ConstBytes = const std::byte*;

}  // namespace muster::comm
