#include "base/cycles.h"

namespace muster {
namespace {

struct Start {
  Clock::time_point time = Clock::now();
  uint64_t cycles = muster::cycles();
};

const Start& start() {
  static const Start first;
  return first;
}

}  // namespace

Clock::time_point FastClock::look() {
  using std::chrono::nanoseconds;
  constexpr nanoseconds kSpan = std::chrono::milliseconds(10), kMeasured = std::chrono::milliseconds(1);
  const Start& first = start();
  time_ = Clock::now();
  cycles_ = cycles();
  const nanoseconds since = time_ - first.time;
  const uint64_t counted = cycles_ - first.cycles;
  if (since < kMeasured || counted == 0) {  // too early to know how long a cycle is
    span_ = 0;
    return time_;
  }
  cycle_ns_ = static_cast<double>(since.count()) / static_cast<double>(counted);
  span_ = static_cast<uint64_t>(static_cast<double>(kSpan.count()) / cycle_ns_);
  return time_;
}

}  // namespace muster
