// Memory for pieces: for incoming ones, and for copies of outgoing ones that wait.
//
// Thread-safety: functions.
#pragma once

#include <cstddef>
#include <span>

#include "transport/transport.h"

namespace muster::transport {

inline constexpr size_t kPieceAlignment = 64;

// Memory for a piece: 64-byte aligned, and used by nobody else. A large piece is its own mapping, which takes pages
// only where it is written. Throws std::bad_alloc.
Piece make_piece(size_t bytes);
Piece copy_of(std::span<const std::byte> data);

}  // namespace muster::transport
