// Compiled with -mavx2. It uses no inline functions of external linkage: the linker might take this file's copy of one
// for the whole program, and a processor without AVX2 could not run it.
#include "base/hash_avx2.h"

#define XXH_INLINE_ALL  // static functions
#include <xxhash.h>

#ifndef __AVX2__
#error "compile this file with -mavx2"
#endif

uint64_t muster::hash_with_avx2(const void* data, size_t size, uint64_t seed) {
  return XXH3_64bits_withSeed(data, size, seed);
}
