// Executor: the threads of a worker. They fetch messages, run handlers, and never run out while handlers wait.
//
// A message should not cost a change of threads: waking one takes ten microseconds, a small handler less than one. So
// one thread of the pool leads: it polls the transport and runs the handlers that it finds, itself, one after another.
//
//   leader    polls; runs what is queued; with nothing to do it spins for a moment, yields for a millisecond, sleeps
//             until somebody wakes it. It runs a handler only if an heir is parked (it makes one if there is none), so
//             that somebody polls always
//   heir      one of the parked threads. It looks every kTick whether the leader is stuck in a handler for longer than
//             kSlow. If so it leads from now on; the old leader comes back to the pool when its handler ends. While the
//             leader sleeps the heir sleeps too (Driver::sleep_second), and nothing of the pool runs at all. It is
//             woken by what comes while the leader is awake: by the leader before a handler if more waits already, by
//             whoever sends or posts later, the handler too. So one small handler after a sleep costs no second thread,
//             and a slow one holds up nobody either
//   guest     a thread that waits for an answer (wait()) polls itself while nobody else needs to: then the answer too
//             costs no change of threads. Requests that it finds are for the pool, which it wakes; and where requests
//             have come lately it leaves polling to the leader
//
// A handler that waits (wait() on a thread of the pool) first is a guest, then gives up the lead and does not count as
// a running thread. So nested calls, however deep, find a thread: the number of handlers that *run* is bounded by
// max_threads, the number that wait is not.
//
// Who leads is an atomic word, and nothing depends on there being only one: polling is guarded by a lock of its own,
// and jobs by another.
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
  virtual bool poll() = 0;  // by one thread at a time; may call Executor::post(). Whether there was anything
  virtual void sleep(std::chrono::nanoseconds limit) = 0;
  virtual void wake() = 0;
  virtual void hush(bool on) = 0;       // see PolledTransport
  virtual bool pending() const = 0;     // whether poll() would find something
  virtual void announce_waiting() = 0;  // see PolledTransport
  virtual void sleep_second(std::chrono::nanoseconds limit, const std::function<bool()>& unless) = 0;  // see there
  virtual void wake_second() = 0;
  // What is due at a certain time (the deadlines of calls): tick() is called then, or soon after.
  virtual Clock::time_point next_tick() const = 0;
  virtual void tick(Clock::time_point now) = 0;

 protected:
  ~Driver() = default;
};

class Job {
 public:
  virtual ~Job() = default;
  virtual void run() noexcept = 0;
};

class Executor {
 public:
  struct Options {
    std::string name;                                             // of the threads
    int max_threads = 16;                                         // that run at once
    std::chrono::nanoseconds spin{0};                             // before it sleeps (shm/spin.h)
    std::function<void(const std::function<void()>&)> in_thread;  // wraps each thread's work; may be empty
    std::function<void()> on_idle;                                // called when the last job has ended; may be empty
  };
  static constexpr std::chrono::microseconds kTick{250}, kSlow{100}, kQuiet{1000};

  Executor(Driver& driver, Options options);
  ~Executor();
  void start();  // the threads; the driver is used from now on

  // False: the pool has stopped, and the job was not taken.
  bool post(std::unique_ptr<Job> job);
  bool post(std::function<void()> job);

  // Waits until done(), the deadline, or for ever. `sleep(limit)` sleeps until done() may hold. Returns done().
  bool wait(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
            Deadline deadline);

  // Runs what is queued and lets running handlers end; no thread is left after it. Handlers must come to an end: fail
  // what they wait for first. Not from a thread of the pool.
  void stop();

  static bool polls();   // whether the caller is inside Driver::poll()
  bool in_pool() const;  // whether the caller is a thread of this pool
  // Whether the caller is inside Driver::poll() as the leader, not as a guest: nobody takes the lead from it there, and
  // it sees to Driver::announce_waiting().
  bool polls_as_leader() const;
  void call_on_tick();  // Driver::next_tick() is sooner than it was
  bool busy() const;    // whether any handler is queued, running or waiting
  int threads() const;  // of the pool, for tests

 private:
  struct Worker;
  void spawn();
  void main(Worker& me);
  bool follow(Worker& me);
  void lead(Worker& me);
  void run(Worker& me, std::unique_ptr<Job> job);
  std::unique_ptr<Job> take();
  bool can_take() const;
  bool poll_as_guest(const std::function<bool()>& done, Deadline deadline);
  void hand_over(Worker& me);
  void call_leader();
  void call_heir();
  std::chrono::nanoseconds until_tick() const;
  bool poll();
  bool leads(const Worker& me) const;
  bool requests_come() const;  // lately

  Driver& driver_;
  const Options options_;
  const std::chrono::nanoseconds spin_;

  std::mutex polling_;  // held by whoever polls
  std::atomic<Worker*> leader_{nullptr};
  std::atomic<int> sleepers_{0};          // leaders that sleep, the one before too
  std::atomic<bool> heir_sleeps_{false};  // in sleep_second()
  std::atomic<int> guests_{0};
  std::atomic<int64_t> last_request_{0};  // when post() was last called
  std::atomic<int> unfinished_{0};        // jobs
  std::atomic<int> queued_{0};

  mutable std::mutex mutex_;  // guards what follows
  std::deque<std::unique_ptr<Job>> jobs_;
  std::condition_variable heir_wake_, parked_wake_, stopped_;
  Worker* heir_ = nullptr;
  std::list<std::unique_ptr<Worker>> workers_;
  std::list<std::unique_ptr<Worker>> ended_;
  int parked_ = 0, starting_ = 0, blocked_ = 0;  // of workers_; blocked: in a handler that sleeps in wait()
  std::atomic<bool> stop_{false};
};

}  // namespace muster::rpc
