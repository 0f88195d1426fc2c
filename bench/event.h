// How a program tells bench/run.py, which has started it, when something happened: a line with the
// time (CLOCK_MONOTONIC, seconds), which is the same clock in all processes.
//
// Thread-safety: all functions.
#pragma once

#include <cstdio>
#include <ctime>

inline void tell(const char* event) {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  std::printf("{\"event\": \"%s\", \"t\": %.6f}\n", event,
              static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec));
  std::fflush(stdout);
}
