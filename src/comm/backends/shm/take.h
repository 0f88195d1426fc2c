// Taking: a rank that reads what a peer wrote, and is the only one to read it, also writes to it.
//
// A cache line that one core wrote and another has only read lies in both caches. The writer must ask for it again
// before its next write, which costs 7 ns per line on a Zen 4, however many lines it asks for. A line that the reader
// has also written moves from core to core as a whole, for 1.4 ns per line each way (docs/decisions/0009). So a reader
// stores one word of each line back, unchanged.
//
// Use this only for memory that no other thread reads or writes meanwhile.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "comm/byte_parts.h"

namespace muster::comm::shm_backend {

inline constexpr size_t kTakenAtOnce = size_t{16} << 10;  // lines that have just been read are in the first-level cache

// Stores one word back in each line of memory that was just read. Words that lie only partly in it are not touched.
inline void take(Bytes data, size_t bytes) {
  constexpr size_t kCacheLine = 64;
  using Word = volatile uint64_t;
  const auto begin = reinterpret_cast<uintptr_t>(data), end = begin + bytes;
  for (uintptr_t at = (begin + sizeof(Word) - 1) / sizeof(Word) * sizeof(Word); at + sizeof(Word) <= end;
       at = (at / kCacheLine + 1) * kCacheLine) {
    auto* const word = reinterpret_cast<Word*>(at);
    *word = *word;
  }
}

// Copies and takes.
inline void take_bytes(Bytes to, Bytes from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kTakenAtOnce) {
    const size_t now = std::min(kTakenAtOnce, bytes - at);
    copy_bytes(to + at, from + at, now);
    take(from + at, now);
  }
}

}  // namespace muster::comm::shm_backend
