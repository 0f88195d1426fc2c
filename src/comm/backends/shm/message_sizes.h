// How the bytes of a message are cut on their way through a ring (messages.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/processor.h"
#include "comm/backends/shm/messages.h"

namespace muster::comm::shm_backend {

// A message moves in pieces, so that its receiver reads one while its sender writes the next: two or four of them, if
// they are not too short, of at most half a core's first-level cache. Each piece costs a line that moves between the
// cores. Measured on a Zen 5 and a Zen 4 (docs/decisions/0009).
// `ring`: its bytes. Two pieces fit into it.
inline uint64_t piece_of(uint64_t bytes, uint64_t ring) {
  static const bool few = is_zen_5_or_later();
  const auto lines = [&](uint64_t part) { return bytes / part / kRecordLine * kRecordLine; };
  return std::min(
      few ? std::clamp<uint64_t>(lines(2), 8 << 10, 16 << 10) : std::clamp<uint64_t>(lines(4), 2 << 10, 16 << 10),
      (ring - 2 * kRecordLine) / 2 / kRecordLine * kRecordLine);
}
// After so many bytes from or to one peer, it is the others' turn.
inline constexpr uint64_t kTurn = uint64_t{256} << 10;
// Tensors on a heap take the shorter ways (by reference, to a posted receive) if they have so many bytes. For smaller
// ones two copies through the ring are faster: the lines of the tensors would be in both ranks' caches, and a rank may
// not write to the lines that it only reads there (docs/decisions/0009).
inline constexpr uint64_t kLeastByReference = uint64_t{2} << 20;
inline constexpr uint64_t kPieceByReference = uint64_t{128} << 10;  // that one of the two ranks copies
inline constexpr uint64_t pieces_by_reference(uint64_t bytes) {
  return (bytes + kPieceByReference - 1) / kPieceByReference;
}

inline constexpr uint64_t whole_lines(uint64_t bytes) { return (bytes + kRecordLine - 1) / kRecordLine * kRecordLine; }
// The bytes of the data that follow the line.
inline constexpr uint64_t behind_line(uint64_t bytes) { return bytes <= RecordLine::kData ? 0 : whole_lines(bytes); }

}  // namespace muster::comm::shm_backend
