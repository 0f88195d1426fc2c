// The processor's clock: readable in a few nanoseconds, the same on all cores of a host.
//
// Thread-safety: all functions.
#pragma once

#include <chrono>
#include <cstdint>

#include "muster/base/deadline.h"

namespace muster {

inline uint64_t cycles() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();  // invariant on every x86-64 processor since 2008
#elif defined(__aarch64__)
  uint64_t count;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
#else
  return static_cast<uint64_t>(Clock::now().time_since_epoch().count());
#endif
}

// How long a cycle is, measured over the time since this was made: good to a thousandth after a millisecond.
class CycleLength {
 public:
  std::chrono::nanoseconds of(uint64_t count) const {
    const uint64_t passed = cycles() - began_cycles_;
    if (passed == 0) return std::chrono::nanoseconds(0);
    const auto time = static_cast<double>(std::chrono::nanoseconds(Clock::now() - began_).count());
    return std::chrono::nanoseconds(
        static_cast<int64_t>(static_cast<double>(count) * time / static_cast<double>(passed)));
  }

 private:
  Clock::time_point began_ = Clock::now();
  uint64_t began_cycles_ = cycles();
};

}  // namespace muster
