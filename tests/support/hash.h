// FNV-1a over numbers, as 8 bytes each: long results as one expected number.
#pragma once

#include <cstdint>

namespace muster::test {

class Hash {
 public:
  void add(uint64_t number) {
    for (int byte = 0; byte < 8; ++byte) state_ = (state_ ^ (number >> (8 * byte) & 255)) * 0x100000001b3ULL;
  }
  uint64_t get() const { return state_; }

 private:
  uint64_t state_ = 0xcbf29ce484222325ULL;
};

}  // namespace muster::test
