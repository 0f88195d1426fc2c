// Who comes last to a group's collectives, how often and by how much. This is always measured.
//
// In shared memory every rank sees when every rank arrived, by the host's one clock. Over a wire there is no such
// clock, but every collective begins with an exchange of announcements, in which each rank waits for all others. The
// rank that waited for the shortest time came last. The others waited for it alone for the difference between the two
// shortest times. Each announcement says how long its rank waited in the previous collective, so every rank knows one
// collective later; the last collective of a group is not counted. The error of one figure is the difference between
// the times that messages take from one rank to another (and that threads take to wake up): a rank in the middle of an
// uneven network waits for a shorter time than others although it is not late.
//
// Over several hosts (backend hierarchical) the leaders combine both. Their announcements also say who came last within
// their host, and by how much. The rank that came last of all is the last rank of the host that came last; it is late
// by its lateness within the host or by that of the host, whichever is smaller. So if several ranks of one host are
// late together, the host shows as late (HostArrivals::hosts), and no single rank of it does. Leaders count in memory
// that the ranks of their host share.
//
// Thread-safety: add(), note() and last() from one thread at a time; the rest from any thread.
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

  // `memory`: words(ranks) words, which other ranks may read through their own Stragglers. If it is empty, this object
  // allocates its own memory.
  explicit Stragglers(int ranks, Unit unit = Unit::kCycles, std::span<Word> memory = {});
  static size_t words(int ranks) { return 1 + 2 * static_cast<size_t>(ranks); }

  // Counts one collective, to which rank r came at arrived(r).
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
  // Counts one collective, to which rank last.rank came last.
  void add(Last last) {
    const size_t at = 1 + 2 * static_cast<size_t>(last.rank);
    increase(words_[0], 1);
    increase(words_[at], 1);
    increase(words_[at + 1], last.late);
    last_ = last;
  }
  const Last& last() const { return last_; }  // of the most recent collective that was counted

  std::vector<Straggler> by_rank() const;
  int size() const { return ranks_; }
  uint64_t operations() const { return words_[0].load(std::memory_order_relaxed); }
  std::chrono::nanoseconds time(uint64_t late) const {
    return unit_ == Unit::kCycles ? cycle_.of(late) : std::chrono::nanoseconds(late);
  }
  // A sentence about the rank that the others waited for longest, if it came last to two thirds of the collectives and
  // cost at least `at_least` and a twentieth of the time since this object was made; else "". `name` returns what to
  // call a rank, if not "rank 3".
  std::string report(const std::string& group, std::chrono::nanoseconds at_least = {},
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

// What the leaders of several hosts count with. The group between them (a WireBackend) counts in `ranks` and `hosts`;
// the backend that made that group writes what it knows of its own host. One thread at a time, except for readers of
// `ranks` and `hosts`.
struct HostArrivals {
  HostArrivals(int ranks_of_all, int number_of_hosts, std::span<Stragglers::Word> memory)
      : ranks(ranks_of_all, Stragglers::Unit::kNanoseconds, memory.first(Stragglers::words(ranks_of_all))),
        hosts(number_of_hosts, Stragglers::Unit::kNanoseconds, memory.last(Stragglers::words(number_of_hosts))) {}
  static size_t words(int ranks, int hosts) { return Stragglers::words(ranks) + Stragglers::words(hosts); }

  Stragglers ranks, hosts;
  // Set before an operation between the hosts. If that operation is made of several steps, only the announcement of the
  // first step counts, because each other step begins when the one before it has ended.
  bool counts_next = false;
  // The rank that came last on this host to the previous operation, and how much later than the rank before it.
  int last = 0;
  std::chrono::nanoseconds late = std::chrono::nanoseconds::max();
};

}  // namespace muster::comm
