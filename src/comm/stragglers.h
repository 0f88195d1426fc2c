// Who comes last to a group's collectives, how often and by how much. Always on: every rank sees when every rank
// arrived.
//
// Thread-safety: note() from one thread at a time; the rest from any.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/cycles.h"
#include "muster/comm/group.h"

namespace muster::comm {

class Stragglers {
 public:
  explicit Stragglers(int ranks) : ranks_(static_cast<size_t>(ranks)) {}

  // One collective, to which rank r came at arrived(r), in cycles().
  template <typename Arrived>
  void note(Arrived arrived) {
    uint64_t last = 0, before = 0;  // the last arrival, and the one before it
    size_t who = 0;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const uint64_t when = arrived(static_cast<int>(r));
      if (when >= last) {
        before = last;
        last = when;
        who = r;
      } else if (when > before) {
        before = when;
      }
    }
    add(operations_, 1);
    add(ranks_[who].times_last, 1);
    add(ranks_[who].late, last - before);
  }

  std::vector<Straggler> by_rank() const;
  uint64_t operations() const { return operations_.load(std::memory_order_relaxed); }
  // A sentence about the rank that the others waited for longest, where it came last to two thirds of the collectives
  // and cost `at_least` and more than a twentieth of the time since this was made; else "".
  std::string verdict(const std::string& group, std::chrono::nanoseconds at_least = {}) const;

 private:
  struct Rank {
    std::atomic<uint64_t> times_last{0}, late{0};
  };
  static void add(std::atomic<uint64_t>& sum, uint64_t value) {  // one writer: no locked instruction
    sum.store(sum.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
  }

  std::vector<Rank> ranks_;
  std::atomic<uint64_t> operations_{0};
  const CycleLength cycle_;
  const Clock::time_point began_ = Clock::now();
};

}  // namespace muster::comm
