// Random choices for fuzzers, the same for the same seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>

namespace muster::test {

// What one round draws from.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  size_t below(size_t bound) { return bound == 0 ? 0 : engine_() % bound; }
  bool one_in(size_t n) { return below(n) == 0; }
  char byte() { return static_cast<char>(engine_()); }
  std::string bytes(size_t size) {
    std::string some(size, '\0');
    for (char& c : some) c = byte();
    return some;
  }
  uint64_t number() { return engine_() >> below(64); }

 private:
  std::mt19937_64 engine_;
};

}  // namespace muster::test
