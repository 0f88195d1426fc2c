// Lane: the order of a group's collectives.
//
// Operations start in the order in which run() and submit() were called, one at a time. A blocking one runs on its
// caller's thread. An asynchronous one runs on the lane's progress thread, or, if somebody waits for it first, on that
// thread: whoever needs a result need not wait until another thread has woken up.
//
// What is to happen after a job (callbacks of a future) runs on the same thread when the lane has been given back, so
// it may run operations and wait for them. Meanwhile another progress thread does what is queued: it is made when one
// is needed, and stays.
//
// Thread-safety: run(), submit() and drive() from any thread; destruction from one, after the last call. Jobs must not
// throw and must not call the lane. stop() lets the job under way, whoever runs it, and those queued come to an end
// (they fail, because the channel has failed) and joins the threads; so not from within a job, or behind one on a
// thread of the lane's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "muster/base/deadline.h"

namespace muster::comm {

class Lane {
 public:
  // Told whether its thread belongs to somebody who waits for it, or is the lane's own. Whether its `after` is to be
  // called.
  using Job = std::function<bool(bool by_waiter)>;
  using After = std::function<void()>;

  explicit Lane(std::string name) : name_(std::move(name)) {}
  ~Lane() { stop(); }

  void submit(Job job, After after = nullptr);

  // Runs `job` in its turn, on this thread, and returns when it has run.
  template <typename Function>
  void run(Function&& job) {
    if (!try_take()) return run_in_turn(job);
    job(true);
    give_back();
  }

  // The lane for the calling thread, if it is free and nobody waits; then give_back().
  bool try_take() {
    uint32_t free = 0;
    return state_.compare_exchange_strong(free, kBusy, std::memory_order_acquire, std::memory_order_relaxed);
  }
  void give_back() {
    uint32_t mine = kBusy;
    if (!state_.compare_exchange_strong(mine, 0, std::memory_order_release, std::memory_order_relaxed)) [[unlikely]]
      give_back_to_others();
  }

  // Runs what is queued, in its order and on this thread, until done() or until nothing is queued; sleeps while another
  // thread runs a job, until `deadline` at most. done() must come to hold inside a job; it is called with the lane's
  // lock held.
  void drive(const std::function<bool()>& done, Deadline deadline = Deadline::never());

  void stop();

 private:
  // Whoever finds 0 takes the lane without the lock. kWanted: somebody waits for it, or jobs are queued; then it is
  // taken and given back under the lock alone.
  static constexpr uint32_t kBusy = 1, kWanted = 2;

  struct Queued {
    Job job;
    After after;
  };

  void run_in_turn(const std::function<void(bool by_waiter)>& job);
  void run_first(std::unique_lock<std::mutex>& lock, bool by_waiter);
  void await_turn(std::unique_lock<std::mutex>& lock, Deadline deadline = Deadline::never());
  void give_back_to_others();
  bool busy() const { return (state_.load(std::memory_order_acquire) & kBusy) != 0; }
  void want() { state_.fetch_or(kWanted, std::memory_order_relaxed); }
  bool idle_but_wanted() const { return state_.load(std::memory_order_acquire) == kWanted; }
  void release();           // with the lock, of a lane that is busy or wanted: it is free for the next job
  void have_free_thread();  // with the lock: one that is not in an `after`
  void work();

  const std::string name_;
  std::atomic<uint32_t> state_{0};
  std::mutex mutex_;
  std::condition_variable wake_, turn_;  // of the progress threads; of those who wait until the lane is free
  std::deque<Queued> jobs_;
  bool stop_ = false;
  int waiters_ = 0;
  size_t free_threads_ = 0;  // of threads_: those not in an `after`
  std::vector<std::thread> threads_;
};

}  // namespace muster::comm
