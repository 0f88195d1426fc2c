#include "comm/lane.h"

#include "base/thread.h"

namespace muster::comm {

void Lane::submit(Job job) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = start_thread(name_, [this] { work(); });
  jobs_.push_back(std::move(job));
  want();
  wake_.notify_one();
}

void Lane::run_in_turn(const Job& job) {
  bool finished = false;  // guarded by the lane's lock
  submit([&](bool by_waiter) {
    job(by_waiter);
    const std::lock_guard lock(mutex_);
    finished = true;
  });
  drive([&] { return finished; });
}

void Lane::drive(const std::function<bool()>& done) {
  std::unique_lock lock(mutex_);
  while (!done()) {
    if (busy()) {
      ++drivers_;
      want();
      if (busy()) turn_.wait(lock);
      --drivers_;
    } else if (!jobs_.empty()) {
      run_first(lock, true);
    } else {
      break;
    }
  }
  if (idle_but_wanted()) release();
}

void Lane::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    want();
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(mutex_);
  if (idle_but_wanted()) release();
}

void Lane::run_first(std::unique_lock<std::mutex>& lock, bool by_waiter) {
  Job job = std::move(jobs_.front());
  jobs_.pop_front();
  state_.fetch_or(kBusy, std::memory_order_acquire);  // it is wanted, so nobody else could
  lock.unlock();
  job(by_waiter);
  job = nullptr;  // what it holds is released without the lock
  lock.lock();
  release();
}

void Lane::give_back_to_others() {
  const std::lock_guard lock(mutex_);
  release();
}

void Lane::release() {
  const bool wanted = drivers_ > 0 || !jobs_.empty();
  state_.store(wanted ? kWanted : 0, std::memory_order_release);
  if (drivers_ > 0) turn_.notify_all();
  if (!jobs_.empty() || stop_) wake_.notify_one();
}

void Lane::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return !busy() && (!jobs_.empty() || stop_); });
    if (jobs_.empty()) return;
    run_first(lock, false);
  }
}

}  // namespace muster::comm
