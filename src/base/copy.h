// copy_bytes(): memcpy without its two traps.
//
//   null pointers   are undefined for memcpy even if it copies 0 bytes. Empty tensors have null pointers.
//   slow offsets    From 2,112 bytes on, glibc's memcpy uses "rep movsb" on processors that say they do it fast (FSRM:
//                   Zen 3 and 4, Ice Lake). Zen 4 copies 3.6 GB/s instead of 107 if (to - from) mod 4096 is 1 to 23,
//                   and 42 if it is 24 to 31 (8 KiB in the first-level cache). Tensors and pages begin on 64 bytes and
//                   never meet it; views of tensors and data behind a header do. Then shorter pieces, which glibc
//                   copies with vectors, are 5 to 15 times faster (`bench/run.py --only copy` walks all offsets).
//
// Thread-safety: as memcpy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace muster {

namespace copying {

inline constexpr size_t kSlowFrom = 2048;  // bytes; a piece of this size is fast at every offset
inline constexpr uintptr_t kPage = 4096, kSlowOffsets = 32;

inline bool is_slow(const void* to, const void* from, size_t bytes) {
#if defined(__x86_64__)
  const uintptr_t offset = (reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from)) % kPage;
  return bytes > kSlowFrom && offset - 1 < kSlowOffsets - 1;  // 0 becomes a large number
#else
  (void)to, (void)from, (void)bytes;
  return false;
#endif
}

inline void in_pieces(std::byte* to, const std::byte* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kSlowFrom) std::memcpy(to + at, from + at, std::min(kSlowFrom, bytes - at));
}

}  // namespace copying

// The ranges must not overlap, unless they are the same. One or two words are copied without a call, because the call
// would take longer than the copy.
inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes >= sizeof(uint64_t) && bytes <= 2 * sizeof(uint64_t)) {
    auto* const out = static_cast<std::byte*>(to);
    const auto* const in = static_cast<const std::byte*>(from);
    uint64_t first = 0, last = 0;
    std::memcpy(&first, in, sizeof first);
    std::memcpy(&last, in + bytes - sizeof last, sizeof last);
    std::memcpy(out, &first, sizeof first);
    std::memcpy(out + bytes - sizeof last, &last, sizeof last);
  } else if (bytes == 0 || to == from) {
    return;
  } else if (copying::is_slow(to, from, bytes)) [[unlikely]] {
    copying::in_pieces(static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace muster
