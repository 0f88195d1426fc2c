// Lane: the order of a group's collectives.
//
// A blocking operation runs on its caller's thread when nothing is queued; otherwise, and for asynchronous ones, the
// lane's progress thread runs it in turn. Operations start in the order in which run() and submit() were called, one at
// a time.
//
// Thread-safety: run() and submit() from any thread; destruction from one, after the last call. Jobs must not throw and
// must not call the lane. stop() lets the job under way and those queued come to an end (they fail, because the channel
// has failed) and joins the thread.
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
  using Job = std::function<void()>;

  explicit Lane(std::string name) : name_(std::move(name)) {}
  ~Lane() { stop(); }

  void submit(Job job);

  // Runs `job` in its turn and returns when it has run.
  template <typename Function>
  void run(Function&& job) {
    std::unique_lock lock(mutex_);
    if (busy_ || !jobs_.empty()) {
      lock.unlock();
      run_in_turn([&] { job(); });
      return;
    }
    busy_ = true;
    lock.unlock();
    job();
    lock.lock();
    busy_ = false;
    if (!jobs_.empty()) wake_.notify_one();
  }

  void stop();

 private:
  void run_in_turn(const Job& job);
  void work();

  const std::string name_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  bool busy_ = false, stop_ = false;
  std::thread thread_;
};

}  // namespace muster::comm
