// How a wait begins, before it sleeps.
//
// A peer that runs on another core answers in under a microsecond; a sleep and a wake-up cost ten, and more in a
// virtual machine whose core has gone idle. So a wait first spins, for about as long as two sleeps cost, if there is a
// core for every rank. If ranks share cores it does not, because spinning only keeps the peer from running. Then the
// wait looks again and again and yields the core in between; a yield costs almost nothing if no other thread wants the
// core. Only then does it sleep.
#pragma once

#include <sched.h>

#include <chrono>

namespace muster::shm {

inline constexpr std::chrono::microseconds kSpin{20};
inline constexpr std::chrono::microseconds kYield{1000};

// kSpin if each of `threads` busy threads can have one of these cores (base/cores.h) to itself, else zero.
inline std::chrono::nanoseconds spin_for(int threads, int cores) {
  return threads <= cores ? std::chrono::nanoseconds(kSpin) : std::chrono::nanoseconds::zero();
}

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Spins for at most `limit` and returns whether `condition()` came to hold. The first rounds neither pause nor read the
// clock, because either may take as long as the peer's answer; after them the clock is read once every 32 pauses.
template <typename Condition>
bool spin_until(std::chrono::nanoseconds limit, Condition condition) {
  if (condition()) return true;
  if (limit <= limit.zero()) return false;
  for (int i = 0; i < 200; ++i)
    if (condition()) return true;
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (condition()) return true;
      cpu_relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return condition();
}

// Yields the core until `condition()` holds, at most for `limit`; returns whether it does.
template <typename Condition>
bool yield_until(std::chrono::nanoseconds limit, Condition condition) {
  if (limit <= limit.zero()) return condition();
  for (const auto end = std::chrono::steady_clock::now() + limit; std::chrono::steady_clock::now() < end;) {
    ::sched_yield();
    for (int i = 0; i < 8; ++i) {
      if (condition()) return true;
      cpu_relax();
    }
  }
  return condition();
}

}  // namespace muster::shm
