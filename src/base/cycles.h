// The processor's clock: readable in a few nanoseconds, the same on all cores of a host.
//
// Thread-safety: all functions.
#pragma once

#include <algorithm>
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

// The length of a cycle, measured over the time since this object was made: accurate to a thousandth after a
// millisecond.
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

// Clock::now() by means of cycles(), at a third of its cost: each thread reads the clock itself once in ten
// milliseconds, and in between adds the cycles since then. Off by less than a microsecond, or by five while the
// system's clock is being adjusted; may step back by as much.
class FastClock {
 public:
  static Clock::time_point now() {
    thread_local FastClock mine;
    const uint64_t passed = cycles() - mine.cycles_;
    if (passed >= mine.span_) [[unlikely]]
      return mine.look();
    return mine.time_ + std::chrono::nanoseconds(static_cast<int64_t>(static_cast<double>(passed) * mine.cycle_ns_));
  }

  // now(), but never before `began`: what began does not end earlier.
  static Clock::time_point now_after(Clock::time_point began) { return std::max(began, now()); }

 private:
  Clock::time_point look();

  uint64_t cycles_ = 0, span_ = 0;  // at cycles_ it was time_; used for `span_` cycles after that
  Clock::time_point time_;
  double cycle_ns_ = 0;
};

// deadline.passed(), but reads the clock only if the deadline is near.
inline bool has_passed(const Deadline& deadline) {
  return FastClock::now() + std::chrono::milliseconds(1) >= deadline.when() && deadline.passed();
}

}  // namespace muster
