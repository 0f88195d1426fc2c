// Memory for pieces: for those that come, and for copies of those that wait to go.
//
// Thread-safety: functions.
#pragma once

#include <cstddef>
#include <span>

#include "transport/transport.h"

namespace muster::transport {

inline constexpr size_t kPieceAlignment = 64;

// Memory for a piece: 64-byte aligned, and the caller's alone. Large ones are mappings of their own, which
// take pages only where they are written. std::bad_alloc.
Piece make_piece(size_t bytes);
Piece copy_of(std::span<const std::byte> data);

}  // namespace muster::transport
