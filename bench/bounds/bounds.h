// What bench_bounds measures, and how it prints a figure.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "muster/base/deadline.h"

namespace bench {

// Each prints its figures. main.cpp says which they are.
void fault();
void idle();
void memory();
void copy();

inline muster::Deadline patience() { return muster::Deadline::after(std::chrono::minutes(5)); }
inline int64_t now_ns() { return muster::Clock::now().time_since_epoch().count(); }  // the same clock in all processes

inline void print(const char* bench, const std::string& what, int ranks, double typical, double worst, double bound,
                  const char* unit) {
  std::printf(R"({"bench": "%s", "what": "%s", "ranks": %d, "typical": %.4g, "worst": %.4g, "bound": %.4g, )"
              R"("unit": "%s"})"
              "\n",
              bench, what.c_str(), ranks, typical, worst, bound, unit);
  std::fflush(stdout);
}

// Prints the median and the longest of a list of nanoseconds, in milliseconds.
inline void print_ms(const char* bench, const std::string& what, int ranks, std::vector<int64_t> ns, double bound) {
  std::sort(ns.begin(), ns.end());
  print(bench, what, ranks, static_cast<double>(ns[ns.size() / 2]) / 1e6, static_cast<double>(ns.back()) / 1e6, bound,
        "ms");
}

}  // namespace bench
