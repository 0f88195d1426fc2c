// Executor: the threads of a worker. They fetch messages, run handlers, and never run out while handlers wait.
//
// A message should not cost a change of threads: waking a thread takes ten microseconds, and a small handler less than
// one. So one thread of the pool leads: it polls the transport and itself runs the handlers that it finds, one after
// another.
//
//   leader    polls, and runs what is queued. If it has nothing to do, it spins for a moment, then yields for a
//             millisecond, then sleeps until another thread wakes it. If slow handlers have all cores of this worker,
//             it sleeps immediately: a yield costs them more than a wake-up. It runs a handler only if an heir is
//             parked (it starts one if there is none), so that there is always a thread that polls.
//   heir      one of the parked threads. Every kTick it checks whether the leader has been in a handler for longer than
//             kSlow. If so, the heir becomes the leader; the old leader comes back to the pool when its handler ends.
//             While the leader sleeps, the heir sleeps too (Driver::sleep_second), and no thread of the pool runs.
//             While the leader is awake, new work wakes the heir: the leader wakes it before a handler if more work
//             waits already, and a thread that sends or posts later wakes it, even the handler itself. So one small
//             handler after a sleep costs no second thread, and a slow handler delays no other.
//   guest     a thread that waits for an answer (wait()). It polls, too, while no other thread needs to: then the
//             answer costs no change of threads either. Requests that it finds are for the pool, which it wakes. If
//             requests have come lately, it leaves polling to the leader. It, too, leaves cores to slow handlers.
//
// A handler that waits (wait() on a thread of the pool) is a guest first; then it gives up the lead, and its thread no
// longer counts as running. So nested calls find a thread, however deep they are: max_threads bounds the number of
// handlers that *run*, not the number of those that wait.
//
// The leader is recorded in an atomic word, but nothing depends on there being only one: polling has its own lock, and
// the queue has another.
//
// Thread-safety: all methods; stop() from outside of the pool.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "muster/base/deadline.h"

namespace muster::rpc {

// What the pool's leader drives.
class Driver {
 public:
  virtual bool poll() = 0;  // by one thread at a time; may call Executor::post(). True if there was anything
  virtual void sleep(std::chrono::nanoseconds limit) = 0;
  virtual void wake() = 0;
  virtual void hush(bool on) = 0;       // see PolledTransport
  virtual bool pending() const = 0;     // whether poll() would find something
  virtual void announce_waiting() = 0;  // see PolledTransport
  virtual void sleep_second(std::chrono::nanoseconds limit, const std::function<bool()>& unless) = 0;  // see there
  virtual void wake_second() = 0;
  // For what is due at a certain time (the deadlines of calls): tick() is called at next_tick(), or soon after.
  virtual Clock::time_point next_tick() const = 0;
  virtual void tick(Clock::time_point now) = 0;

 protected:
  ~Driver() = default;
};

// What a thread of the pool runs: a handler, or something else that may call and wait.
class Runnable {
 public:
  virtual ~Runnable() = default;
  virtual void run() noexcept = 0;
};

class Executor {
 public:
  struct Options {
    std::string name;                                             // of the threads
    int max_threads = 16;                                         // that run concurrently
    std::chrono::nanoseconds spin{0};                             // before it sleeps (shm/spin.h)
    int cores = 1;                                                // for this worker's threads
    std::function<void(const std::function<void()>&)> in_thread;  // wraps each thread's work; may be empty
    std::function<void()> on_idle;                                // called when nothing is queued or runs; may be empty
  };
  static constexpr std::chrono::microseconds kTick{250}, kSlow{100}, kQuiet{1000};
  static constexpr std::chrono::seconds kLate{3};

  Executor(Driver& driver, Options options);
  ~Executor();
  void start();  // the threads; the driver is used from now on

  // False: the pool has stopped, and has not taken it.
  bool post(std::unique_ptr<Runnable> runnable);
  bool post(std::function<void()> function);

  // Waits until done() holds or the deadline passes, and returns done(). `sleep(limit)` sleeps until done() may hold.
  bool wait(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
            Deadline deadline);

  // Runs what is queued and lets running handlers end; no thread is left afterwards. Handlers must be able to end, so
  // fail everything that they wait for first. Must not be called from a thread of the pool. Calls `late` once if that
  // takes longer than kLate.
  void stop(const std::function<void()>& late = [] {});

  static bool polls();   // whether the caller is inside Driver::poll()
  bool in_pool() const;  // whether the caller is a thread of this pool
  // Whether the caller is inside Driver::poll() as the leader, not as a guest. No other thread takes the lead from it
  // there, and it calls Driver::announce_waiting() itself.
  bool polls_as_leader() const;
  void call_on_tick();  // to be called when Driver::next_tick() has become sooner
  bool busy() const;    // whether any handler is queued, running or waiting
  int threads() const;  // of the pool, for tests

 private:
  struct Worker;
  void spawn();
  void main(Worker& me);
  bool follow(Worker& me);
  void lead(Worker& me);
  void run(Worker& me, std::unique_ptr<Runnable> runnable);
  std::unique_ptr<Runnable> take();
  bool can_take() const;
  bool poll_as_guest(const std::function<bool()>& done, Deadline deadline);
  void hand_over(Worker& me);
  void note(Worker& worker, bool overtaken, bool waits);
  void call_leader();
  void call_heir();
  std::chrono::nanoseconds until_tick() const;
  bool poll();
  bool leads(const Worker& me) const;
  bool requests_come() const;                         // whether any came lately
  bool is_crowded(const Worker* me = nullptr) const;  // whether slow handlers, `me` not counted, have all cores

  Driver& driver_;
  const Options options_;
  const std::chrono::nanoseconds spin_;

  std::mutex polling_;  // held by the thread that polls
  std::atomic<Worker*> leader_{nullptr};
  std::atomic<int> sleepers_{0};          // leaders that sleep, former ones included
  std::atomic<bool> heir_sleeps_{false};  // in sleep_second()
  std::atomic<int> guests_{0};
  std::atomic<int64_t> last_request_{0};  // when post() was last called
  std::atomic<int> unfinished_{0};        // Runnables
  std::atomic<int> queued_{0};
  std::atomic<int> slow_{0};  // handlers that have cost their thread the lead and do not wait; note() writes it

  mutable std::mutex mutex_;  // guards what follows
  std::deque<std::unique_ptr<Runnable>> queue_;
  std::condition_variable heir_wake_, parked_wake_, stopped_;
  Worker* heir_ = nullptr;
  std::list<std::unique_ptr<Worker>> workers_;
  std::list<std::unique_ptr<Worker>> ended_;
  int parked_ = 0, starting_ = 0, blocked_ = 0;  // of workers_; blocked: in a handler that sleeps in wait()
  std::atomic<bool> stop_{false};
};

}  // namespace muster::rpc
