// Lane: the order of a group's collectives.
//
// Operations start in the order in which run() and submit() were called, one at a time. A blocking one runs on its
// caller's thread. An asynchronous one runs on the lane's progress thread, or, if somebody waits for it first, on that
// thread: whoever needs a result need not wait until another thread has woken up.
//
// Thread-safety: run(), submit() and drive() from any thread; destruction from one, after the last call. Jobs must not
// throw and must not call the lane. stop() lets the job under way and those queued come to an end (they fail, because
// the channel has failed) and joins the thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace muster::comm {

class Lane {
 public:
  // Told whether its thread belongs to somebody who waits for it, or is the lane's own.
  using Job = std::function<void(bool by_waiter)>;

  explicit Lane(std::string name) : name_(std::move(name)) {}
  ~Lane() { stop(); }

  void submit(Job job);

  // Runs `job` in its turn, on this thread, and returns when it has run.
  template <typename Function>
  void run(Function&& job) {
    std::unique_lock lock(mutex_);
    if (busy_ || !jobs_.empty()) {
      lock.unlock();
      run_in_turn(job);
      return;
    }
    busy_ = true;
    lock.unlock();
    job(true);
    lock.lock();
    release();
  }

  // Runs what is queued, in turn and on this thread, until done() or until nothing is queued; sleeps while another
  // thread runs a job. done() must come to hold inside a job; it is called with the lane's lock held.
  void drive(const std::function<bool()>& done);

  void stop();

 private:
  void run_in_turn(const Job& job);
  void run_first(std::unique_lock<std::mutex>& lock, bool by_waiter);
  void release();  // the lane is free for the next job
  void work();

  const std::string name_;
  std::mutex mutex_;
  std::condition_variable wake_, turn_;  // of the progress thread; of those in drive()
  std::deque<Job> jobs_;
  bool busy_ = false, stop_ = false;
  int drivers_ = 0;
  std::thread thread_;
};

}  // namespace muster::comm
