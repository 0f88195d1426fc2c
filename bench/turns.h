// Compares two kinds of steps that are taken by turns, so that both meet the same state of the machine.
//
// Thread-safety: one thread per rank; all ranks call it alike.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

#include "muster/comm/collectives.h"

namespace bench {

struct Turns {  // medians over the steps, or the pairs of steps
  double ms = 0, ms_other = 0;
  double share = 0;  // how much longer the other step is: 0.1 is 10 %
};

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// Takes `steps` steps of each kind, after two more to warm up. Each kind comes first in every other pair. A step begins
// and ends with a barrier.
template <typename Step, typename OtherStep>
Turns by_turns(int steps, Step step, OtherStep other_step) {
  constexpr int kWarmup = 2;
  const auto ms_of = [](auto& one) {
    muster::barrier();
    const auto start = std::chrono::steady_clock::now();
    one();
    muster::barrier();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  };
  std::vector<double> ms, ms_other, share;
  for (int i = -kWarmup; i < steps; ++i) {
    double a = 0, b = 0;
    if (i % 2 == 0) {
      a = ms_of(step);
      b = ms_of(other_step);
    } else {
      b = ms_of(other_step);
      a = ms_of(step);
    }
    if (i < 0) continue;
    ms.push_back(a);
    ms_other.push_back(b);
    share.push_back(b / a - 1);
  }
  return {median(ms), median(ms_other), median(share)};
}

}  // namespace bench
