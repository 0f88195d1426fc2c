// XXH3 as compiled for processors with AVX2. For hash.cpp.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace muster {

uint64_t hash_with_avx2(const void* data, size_t size, uint64_t seed);

}  // namespace muster
