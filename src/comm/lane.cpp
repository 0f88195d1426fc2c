#include "comm/lane.h"

#include <future>

#include "base/thread.h"

namespace muster::comm {

void Lane::submit(Job job) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = start_thread(name_, [this] { work(); });
  jobs_.push_back(std::move(job));
  wake_.notify_one();
}

void Lane::run_in_turn(const Job& job) {
  std::promise<void> finished;
  submit([&] {
    job();
    finished.set_value();
  });
  finished.get_future().wait();
}

void Lane::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Lane::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return (!jobs_.empty() && !busy_) || (stop_ && jobs_.empty()); });
    if (jobs_.empty()) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    busy_ = true;
    lock.unlock();
    job();
    job = nullptr;  // what it holds is released without the lock
    lock.lock();
    busy_ = false;
  }
}

}  // namespace muster::comm
