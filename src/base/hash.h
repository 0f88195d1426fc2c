// A fast hash of bytes, the same on every machine: XXH3, 64 bits.
#pragma once

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL  // the header alone, without the library
#endif
#include <xxhash.h>

#include <cstddef>
#include <cstdint>

namespace muster {

// hash_of_bytes() with the widest vectors that this processor has.
uint64_t hash_of_many_bytes(const void* data, size_t size, uint64_t seed);

inline uint64_t hash_of_bytes(const void* data, size_t size, uint64_t seed = 0) {
  constexpr size_t kMany = 4096;
  return size < kMany ? XXH3_64bits_withSeed(data, size, seed) : hash_of_many_bytes(data, size, seed);
}

}  // namespace muster
