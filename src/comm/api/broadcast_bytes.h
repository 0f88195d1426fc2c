// Moves any number of bytes from one rank to all, or to another. They travel in pieces, so that no single operation is
// large.
//
// Thread-safety: as collectives.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "muster/comm/collectives.h"

namespace muster::comm {

// As broadcast(), of a tensor of bytes.
void broadcast_bytes(const at::Tensor& bytes, int root, const CollectiveOptions& options = {});

// Rank `to` gets into its tensor of bytes what rank `from` has in its own, of the same size. Both call it, and no
// other.
// Errors: those of send() and recv().
void pass_bytes(const at::Tensor& bytes, int from, int to, const CollectiveOptions& options = {});

// Messages of bytes that travel at the same time. Returns when all have arrived.
struct BytesMessage {
  at::Tensor bytes;
  int peer = 0;
  bool is_sent = false;
};
void pass_together(const std::vector<BytesMessage>& messages, const CollectiveOptions& options = {});

}  // namespace muster::comm
