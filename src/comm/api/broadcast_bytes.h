// Moves any number of bytes from one rank to all, or to another. They travel in pieces, so that no single operation is
// large.
//
// Thread-safety: as collectives.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "muster/comm/collectives.h"

namespace muster::comm {

// Returns the first `count` bytes of rank root's tensor (kByte; the others' may be undefined) on all ranks. All ranks must
// give the same count. Errors: those of broadcast().
at::Tensor broadcast_bytes(const at::Tensor& bytes, int64_t count, int root, const CollectiveOptions& options = {});

// Rank `from` gives a tensor (kByte), and rank `to` gets its first `count` bytes; both call it, and no other. Undefined on
// rank `from`. Errors: those of send() and recv().
at::Tensor pass_bytes(const at::Tensor& bytes, int64_t count, int from, int to, const CollectiveOptions& options = {});

}  // namespace muster::comm
