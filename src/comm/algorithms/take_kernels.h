// Copies between cores: from cache lines that another core has just written (comm/backends/shm/take.h says why a reader
// writes to them). The copy and the writes are one pass. Two passes over 4 MiB take 1.5 times as long.
//
// Thread-safety: pure functions of their arguments' memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace muster::comm {

inline constexpr size_t kCacheLine = 64;

// What a copy writes to the first word of each line that it has read.
enum class Leave : uint8_t { kNothing, kUnchanged };

// Copies `lines` lines from `from`, which begins on a line, to `to`. If `stream`, and `to` begins on a line, too, the
// copy does not come into this core's caches, which is faster if it does not fit there anyway.
void take_lines(std::byte* to, std::byte* from, size_t lines, Leave leave, bool stream);

}  // namespace muster::comm
