// A doorbell: "something that I wrote has changed; look again".
//
// One side publishes values (a counter in shared memory, say) and rings; the other waits for a condition on these
// values. No side makes a system call while no thread sleeps.
//
//   publisher                          waiter
//   1 value.store(x, release)          a waiters += 1            (seq_cst)
//   2 fence(seq_cst)                   b seen = word             (acquire)
//   3 if (waiters != 0) {              c if (condition) goto e
//   4   word += 1                      d futex_wait(word, seen)
//   5   futex_wake(word) }             e waiters -= 1; loop to a unless condition
//
// No wake-up is lost: (2) and (a) are sequentially consistent, so either (3) sees the waiter or (c) sees the value. If
// (3) sees it, then either (4) comes before (b), and (c) sees the value; or (4) comes after (b), and (d) does not sleep
// or is woken by (5). A waiter killed between (a) and (e) leaves waiters too high: later rings cost a system call,
// nothing else.
//
// Thread-safety: lock-free, any number of ringers and waiters, threads or processes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "shm/futex.h"

namespace muster::shm {

struct Bell {
  std::atomic<uint32_t> word{0};
  std::atomic<uint32_t> waiters{0};

  // Steps 2 to 5. The values must have been stored before. Returns whether a thread waits.
  bool ring() {
    full_fence();
    if (static_cast<int32_t>(waiters.load(std::memory_order_relaxed)) <= 0)
      return false;  // negative: a thread that hushes the bell subtracts from `waiters`
    wake();
    return true;
  }

  // Steps 4 and 5 if a thread is seen to sleep, without the fence, at which this core would wait until its stores have
  // reached the others. It may miss one that has just begun to sleep, so a ring() has to follow: this only lets a sleeper
  // wake up while more is being written.
  void hint() {
    if (static_cast<int32_t>(waiters.load(std::memory_order_relaxed)) > 0) wake();
  }

  // Steps 4 and 5, without regard to `waiters`.
  void wake() {
    word.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(word);
  }

  // Steps a to e, once: sleeps for at most `limit` unless `condition()` holds, and returns whether it holds.
  template <typename Condition>
  bool sleep(std::chrono::nanoseconds limit, Condition condition) {
    waiters.fetch_add(1, std::memory_order_seq_cst);
    full_fence();
    const uint32_t seen = word.load(std::memory_order_acquire);
    bool holds = condition();
    if (!holds) {
      futex_wait(word, seen, limit);
      holds = condition();
    }
    waiters.fetch_sub(1, std::memory_order_relaxed);
    return holds;
  }

 private:
  // GCC warns that ThreadSanitizer does not model fences. The fence orders one side's store before its load of the
  // other's word; it publishes nothing by itself (the release and acquire on the values do), so ThreadSanitizer misses
  // nothing.
  static void full_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
};

}  // namespace muster::shm
