// The arithmetic of reductions: element i of every destination becomes the reduction of element i of all sources, in
// their order.
//
// A kernel makes one pass over memory: it accumulates in a block that stays in the first-level cache, then writes the
// block to all destinations. The order is part of the result: sources are combined 0, 1, …, n-1 whatever the size or
// alignment, so all paths give the same bits. bfloat16 and float16 accumulate in float32 and round once, to nearest
// even. AVG divides by n before that rounding; for integers it sums in 64 bits and truncates the quotient. MIN and MAX
// give NaN if any source has one. Integer SUM and PRODUCT wrap.
//
// The kernels are compiled once for each instruction set that Highway knows (SSE4, AVX2, AVX-512, NEON, …); the program
// chooses one when it runs.
//
// Thread-safety: pure functions.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <span>

#include "muster/comm/group.h"

namespace muster::comm {

// Reduces `count` elements. Sources and destinations may be the same memory, element for element, but must not overlap
// otherwise.
using ReduceKernel = void (*)(std::span<std::byte* const> destinations, std::span<const std::byte* const> sources,
                              size_t count);

// The kernel for a dtype and operation, or nullptr if there is none.
ReduceKernel reduce_kernel(c10::ScalarType dtype, ReduceOp op);

}  // namespace muster::comm
