// Who comes last to a group's collectives, how often and by how much. Always on.
//
// In shared memory every rank sees when every rank arrived, by the one clock of the host. Over a wire there is no such
// clock, but every collective begins with an exchange of announcements, in which a rank waits for all others: the rank
// that waits least came last, and the others waited for it alone for as long as the second least exceeds the least.
// Each announcement says how long its rank waited in the one before, so every rank knows, one collective later; the
// last one of a group is not counted. The error of one figure is the difference between the times that messages take
// from one rank to another (and that threads take to wake up): a rank in the middle of an uneven network waits less
// than others although it is not late.
//
// Over several hosts (backend hierarchical) both are put together by the leaders, whose announcements also say who came
// last within their host, and by how much: the rank that comes last of all is that of the host that comes last, and is
// late by what is smaller of the two. So ranks of one host that are late together show as a host that is late
// (HostArrivals::hosts), and no single rank of it is. Leaders count in memory that the ranks of their host share.
//
// Thread-safety: add(), note() and last() from one thread at a time; the rest from any.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/cycles.h"
#include "muster/comm/group.h"

namespace muster::comm {

class Stragglers {
 public:
  using Word = std::atomic<uint64_t>;
  enum class Unit : uint8_t { kCycles, kNanoseconds };
  struct Last {
    int rank = 0;
    uint64_t late = 0;  // in the unit
  };

  // `memory`: words(ranks) of them, which others may read through a Stragglers of their own; empty: its own.
  explicit Stragglers(int ranks, Unit unit = Unit::kCycles, std::span<Word> memory = {});
  static size_t words(int ranks) { return 1 + 2 * static_cast<size_t>(ranks); }

  // One collective, to which rank r came at arrived(r).
  template <typename Arrived>
  void note(Arrived arrived) {
    uint64_t last = 0, before = 0;  // the last arrival, and the one before it
    int who = 0;
    for (int r = 0; r < ranks_; ++r) {
      const uint64_t when = arrived(r);
      if (when >= last) {
        before = last;
        last = when;
        who = r;
      } else if (when > before) {
        before = when;
      }
    }
    add({who, ranks_ > 1 ? last - before : 0});
  }
  // One collective, to which this rank came last.
  void add(Last last) {
    const size_t at = 1 + 2 * static_cast<size_t>(last.rank);
    increase(words_[0], 1);
    increase(words_[at], 1);
    increase(words_[at + 1], last.late);
    last_ = last;
  }
  const Last& last() const { return last_; }  // of the collective that was counted last

  std::vector<Straggler> by_rank() const;
  int size() const { return ranks_; }
  uint64_t operations() const { return words_[0].load(std::memory_order_relaxed); }
  std::chrono::nanoseconds time(uint64_t late) const {
    return unit_ == Unit::kCycles ? cycle_.of(late) : std::chrono::nanoseconds(late);
  }
  // A sentence about the rank that the others waited for longest, where it came last to two thirds of the collectives
  // and cost `at_least` and more than a twentieth of the time since this was made; else "". `name`: what to call it, if
  // not "rank 3".
  std::string verdict(const std::string& group, std::chrono::nanoseconds at_least = {},
                      const std::function<std::string(int)>& name = {}) const;

 private:
  static void increase(Word& sum, uint64_t value) {  // one writer: no locked instruction
    sum.store(sum.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
  }

  const int ranks_;
  const Unit unit_;
  std::vector<Word> own_;
  const std::span<Word> words_;  // operations; of each rank: times last, lateness
  Last last_;
  const CycleLength cycle_;
  const Clock::time_point began_ = Clock::now();
};

// What the leaders of several hosts count with: the group between them (a WireBackend) writes, and the backend that
// made that group says what it knows of its own host. One thread at a time, but for the readers of the two.
struct HostArrivals {
  HostArrivals(int ranks_of_all, int number_of_hosts, std::span<Stragglers::Word> memory)
      : ranks(ranks_of_all, Stragglers::Unit::kNanoseconds, memory.first(Stragglers::words(ranks_of_all))),
        hosts(number_of_hosts, Stragglers::Unit::kNanoseconds, memory.last(Stragglers::words(number_of_hosts))) {}
  static size_t words(int ranks, int hosts) { return Stragglers::words(ranks) + Stragglers::words(hosts); }

  Stragglers ranks, hosts;
  // Set before an operation between the hosts, of which only the first announcement counts: the other steps of one that
  // is made of several begin when the one before has ended.
  bool counts_next = false;
  // Who came last on this host to the operation before, and how long before that the one before it came.
  int last = 0;
  std::chrono::nanoseconds late = std::chrono::nanoseconds::max();
};

}  // namespace muster::comm
