// SplitMix64: random numbers that are the same with every compiler and standard library, and seeds made of several
// numbers.
//
// Thread-safety: a value. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace muster {

class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  // 0 … bound - 1. The bias is below bound / 2^64.
  size_t below(size_t bound) { return static_cast<size_t>(next() % bound); }

 private:
  uint64_t state_;
};

// A seed that depends on all of the numbers and on their order.
inline uint64_t mixed_seed(std::initializer_list<uint64_t> numbers) {
  uint64_t seed = 0;
  for (const uint64_t number : numbers) seed = SplitMix64(seed ^ number).next();
  return seed;
}

}  // namespace muster
