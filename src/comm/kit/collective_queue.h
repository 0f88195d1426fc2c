// CollectiveQueue: the order of a group's collectives.
//
// Operations start in the order in which run() and submit() were called, one at a time. A blocking operation runs on
// its caller's thread. An asynchronous operation runs on the queue's progress thread or, if a thread waits for it
// before it has started, on that thread: a thread that needs a result need not wait until another thread has woken up.
//
// What follows a job (callbacks of a future) runs on the same thread after the queue has been given back, so it may run
// operations and wait for them. Meanwhile another progress thread runs the queued jobs. Such a thread is started when
// it is needed, and stays.
//
// After stop(), submit() runs the job on the calling thread: it fails.
//
// Thread-safety: run(), submit() and drive() from any thread; destruction from one, after the last call. Jobs must not
// throw and must not call the queue. stop() waits for the job under way, on whichever thread it runs, and for the
// queued jobs (they fail, because the channel has failed), and joins the threads. So it must not be called within a
// job. In an `after` on one of the queue's threads it does not wait for that thread, which ends when its `after` has
// returned: a callback may release the last reference to the queue's owner. The queue lives as long if a shared_ptr
// owns it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "muster/base/deadline.h"

namespace muster::comm {

// How long after its deadline an operation may take to find out the cause, and to end.
inline constexpr std::chrono::seconds kSlack{60};

class CollectiveQueue : public std::enable_shared_from_this<CollectiveQueue> {
 public:
  // `by_waiter`: the job runs on a thread that waits for it, not on one of the queue's. Returns whether the queue must
  // call its `after`.
  using Job = std::function<bool(bool by_waiter)>;
  using After = std::function<void()>;

  explicit CollectiveQueue(std::string name) : name_(std::move(name)) {}
  ~CollectiveQueue() { stop(); }

  void submit(Job job, After after = nullptr);

  // Runs `job` in its turn, and returns when it has run. If its turn has not come by `deadline`, calls late() once,
  // which must make the jobs before it end soon. TimeoutError if it has not come `slack` later either; then `job` is not
  // run.
  template <typename Function>
  void run(Function&& job, Deadline deadline = Deadline::never(), const std::function<void()>& late = nullptr,
           std::chrono::nanoseconds slack = kSlack) {
    if (!try_take()) return run_in_turn(job, deadline, late, slack);
    job(true);
    give_back();
  }

  // Takes the queue for the calling thread if the queue is free and no thread waits for it. The caller must call
  // give_back() later.
  bool try_take() {
    uint32_t free = 0;
    return state_.compare_exchange_strong(free, kBusy, std::memory_order_acquire, std::memory_order_relaxed);
  }
  void give_back() {
    uint32_t mine = kBusy;
    if (!state_.compare_exchange_strong(mine, 0, std::memory_order_release, std::memory_order_relaxed)) [[unlikely]]
      give_back_to_others();
  }

  // Runs the queued jobs in their order on this thread, until done() holds or no job is queued. While another thread
  // runs a job, it sleeps, at most until `deadline`. done() must become true inside a job. It is called with the
  // queue's lock held, while a job may run on another thread: what it reads must be atomic, or guarded by a lock that
  // the job takes.
  void drive(const std::function<bool()>& done, Deadline deadline = Deadline::never());
  // In a job that a thread runs because it waits for a later one: until when that thread can wait. Else never(). The
  // job must not take longer, whatever its own deadline is.
  static Deadline patience_of_this_thread();

  void stop();

 private:
  // The bits of state_. A thread that finds 0 takes the queue without the lock. kWanted: a thread waits for the queue,
  // or jobs are queued; then the queue is taken and given back only with the lock held.
  static constexpr uint32_t kBusy = 1, kWanted = 2;

  struct Queued {
    Job job;
    After after;
    const void* owner = nullptr;  // of a job that may be taken back
  };

  void run_in_turn(const std::function<void(bool by_waiter)>& job, Deadline deadline, const std::function<void()>& late,
                   std::chrono::nanoseconds slack);
  void add(Queued job, bool runs_on_a_thread);  // with the lock held
  bool take_back(const void* owner);            // returns whether that job was still queued
  void run_first(std::unique_lock<std::mutex>& lock, bool by_waiter);
  void await_turn(std::unique_lock<std::mutex>& lock, Deadline deadline = Deadline::never());
  void give_back_to_others();
  bool busy() const { return (state_.load(std::memory_order_acquire) & kBusy) != 0; }
  void want() { state_.fetch_or(kWanted, std::memory_order_relaxed); }
  bool idle_but_wanted() const { return state_.load(std::memory_order_acquire) == kWanted; }
  void release();           // with the lock held: makes a queue that is busy or wanted free for the next job
  void have_free_thread();  // with the lock held: makes sure that one thread is not in an `after`
  void work();

  const std::string name_;
  std::atomic<uint32_t> state_{0};
  std::mutex mutex_;
  std::condition_variable wake_, turn_;  // of the progress threads; of the threads that wait until the queue is free
  std::deque<Queued> jobs_;
  bool stop_ = false;
  int waiters_ = 0;
  size_t free_threads_ = 0;  // of threads_: those not in an `after`
  std::vector<std::thread> threads_;
};

}  // namespace muster::comm
