#include "base/hash.h"

#ifdef MUSTER_HASH_AVX2
#include "base/hash_avx2.h"
#endif

namespace muster {

uint64_t hash_of_many_bytes(const void* data, size_t size, uint64_t seed) {
#ifdef MUSTER_HASH_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return hash_with_avx2(data, size, seed);
#endif
  return XXH3_64bits_withSeed(data, size, seed);
}

}  // namespace muster
