// Deadlines: every wait in Muster has one, as a point on the steady clock, so the times of nested waits do not add up.
//
// Thread-safety: a value.
#pragma once

#include <algorithm>
#include <chrono>
#include <utility>

namespace muster {

using Clock = std::chrono::steady_clock;

class Deadline {
 public:
  // Passes after `timeout`. A negative timeout has passed already; one too long for the clock (such as
  // milliseconds::max()) never passes.
  template <typename Rep, typename Period>
  static Deadline after(std::chrono::duration<Rep, Period> timeout, Clock::time_point now = Clock::now()) {
    // Compared in floating point: converting a long timeout to the clock's nanoseconds may overflow.
    const std::chrono::duration<double> room = Clock::time_point::max() - now, seconds = timeout;
    return Deadline(seconds >= room * 0.999 ? Clock::time_point::max()
                                            : now + std::chrono::duration_cast<Clock::duration>(timeout));
  }
  // So much later than this one; than now, if this one has passed. Never, if this one is.
  template <typename Rep, typename Period>
  Deadline later(std::chrono::duration<Rep, Period> by) const {
    return is_never() ? *this : after(by, std::max(when_, Clock::now()));
  }
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  bool is_never() const { return when_ == Clock::time_point::max(); }
  bool passed() const { return !is_never() && Clock::now() >= when_; }
  // Time left: zero once passed, nanoseconds::max() for never().
  std::chrono::nanoseconds left() const {
    if (is_never()) return std::chrono::nanoseconds::max();
    return std::max(std::chrono::nanoseconds::zero(), std::chrono::nanoseconds(when_ - Clock::now()));
  }
  // For poll(2): time left in whole milliseconds, rounded up, at most `cap`.
  int poll_ms(std::chrono::milliseconds cap = std::chrono::milliseconds(1'000'000)) const {
    const auto nanos = left();
    if (nanos >= std::chrono::nanoseconds(cap)) return static_cast<int>(cap.count());
    return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(nanos).count());
  }
  Clock::time_point when() const { return when_; }
  // As condition.wait_until(), but accepts never(). Returns whether `over` was true in time.
  template <typename Condition, typename Lock, typename Predicate>
  bool wait(Condition& condition, Lock& lock, Predicate over) const {
    if (!is_never()) return condition.wait_until(lock, when_, std::move(over));
    condition.wait(lock, std::move(over));  // a wait until the clock's last moment overflows in some libraries
    return true;
  }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
};

}  // namespace muster
