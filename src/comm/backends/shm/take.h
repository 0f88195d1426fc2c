// Taking: a rank that reads what a peer wrote, and is the only one to read it, also writes to it.
//
// A cache line that one core wrote and another has only read lies in both caches. The writer must ask for it again
// before its next write, which costs 7 ns per line on a Zen 4, however many lines it asks for. A line that the reader
// has also written moves from core to core as a whole, for 1.4 ns per line each way (docs/decisions/0009). So a reader
// stores one word of each line back, unchanged.
//
// Use this only for memory that no other thread reads or writes meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/copy.h"
#include "base/processor.h"
#include "comm/algorithms/take_kernels.h"
#include "comm/core/bytes.h"

namespace muster::comm::shm_backend {

inline constexpr size_t kTakenAtOnce = size_t{16} << 10;  // lines that have just been read are in the first-level cache

// Stores one word back in each line of memory that was just read. Words that lie only partly in it are not touched.
inline void take(Bytes data, size_t bytes) {
  using Word = volatile uint64_t;
  const auto begin = reinterpret_cast<uintptr_t>(data), end = begin + bytes;
  for (uintptr_t at = (begin + sizeof(Word) - 1) / sizeof(Word) * sizeof(Word); at + sizeof(Word) <= end;
       at = (at / kCacheLine + 1) * kCacheLine) {
    auto* const word = reinterpret_cast<Word*>(at);
    *word = *word;
  }
}

// Whether the copy of so many bytes stays out of this core's caches, because it has no room there.
inline bool streams(size_t bytes) { return bytes >= size_t{24} << 20; }

// Whether memcpy() copies so many bytes that another core has just written faster than this core takes them, if the
// other core writes them with memcpy(), too: on processors whose "rep movsb" overwrites whole lines without a look at
// what they held. Measured on a Zen 5 (docs/decisions/0009); on a Zen 4 it does not.
inline bool memcpy_takes(size_t bytes) {
  static const bool can = is_zen_5_or_later();
  return can && bytes >= size_t{32} << 10;
}

// Copies and takes. `stream`: the copy does not come into this core's caches.
inline void take_bytes(Bytes to, Bytes from, size_t bytes, bool stream = false) {
  size_t head = (kCacheLine - reinterpret_cast<uintptr_t>(from) % kCacheLine) % kCacheLine;
  if (bytes < head + kCacheLine) head = bytes;
  copy_bytes(to, from, head);
  take(from, head);
  const size_t lines = (bytes - head) / kCacheLine;
  if (lines > 0) take_lines(to + head, from + head, lines, Leave::kUnchanged, stream);
  const size_t tail = head + lines * kCacheLine;
  copy_bytes(to + tail, from + tail, bytes - tail);
  take(from + tail, bytes - tail);
}

// Copies without writing to `from`, which begins on a line.
inline void look_at_bytes(Bytes to, Bytes from, size_t bytes, bool stream) {
  const size_t lines = bytes / kCacheLine, tail = lines * kCacheLine;
  take_lines(to, from, lines, Leave::kNothing, stream);
  copy_bytes(to + tail, from + tail, bytes - tail);
}

}  // namespace muster::comm::shm_backend
