// All benchmarks here measure in this way, the peers' programs included: a warm-up, then kRepeats means over n calls.
// The best mean counts, because the machine's noise can only add to it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>

namespace bench {

inline constexpr int kRepeats = 5;

// MUSTER_BENCH_MOST_CALLS: at most so many. With more ranks than cores, calls of some peers take milliseconds each.
inline int calls_for(size_t bytes) {
  static const int most = [] {
    const char* const given = std::getenv("MUSTER_BENCH_MOST_CALLS");
    return given ? std::max(1, std::atoi(given)) : 1000;
  }();
  return std::min(most, bytes >= (size_t{1} << 22) ? 10 : bytes >= (size_t{1} << 18) ? 100 : 1000);
}

// Returns seconds per call. `align()` brings the ranks together before each repeat. `slowest(seconds)` returns the
// largest of all ranks' seconds: a collective takes as long as its slowest rank, and the root of an MPI's broadcast has
// only begun it when it returns.
template <typename Call, typename Align, typename Slowest>
double best_mean(int calls, Call call, Align align, Slowest slowest) {
  double best = 1e30;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    call();
    align();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call();
    best = std::min(best,
                    slowest(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / calls));
  }
  return best;
}

// The same for one rank.
template <typename Call, typename Align>
double best_mean(int calls, Call call, Align align) {
  return best_mean(calls, call, align, [](double seconds) { return seconds; });
}

}  // namespace bench
