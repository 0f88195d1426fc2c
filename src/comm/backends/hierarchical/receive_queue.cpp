#include "comm/backends/hierarchical/receive_queue.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "base/thread.h"
#include "muster/base/deadline.h"

namespace muster::comm::hierarchical_backend {
namespace {

constexpr std::chrono::microseconds kShortest{20}, kLongest{1000};
constexpr int kPatience = 20;  // the thread sleeps for the time without news, divided by this

}  // namespace

void ReceiveQueue::add(int tag, Deadline deadline, Attempt attempt) {
  std::unique_lock lock(mutex_);
  // First, because it may throw: a receive that has been added ends by its attempt, and in no other way.
  if (!thread_.joinable() && !stop_) thread_ = start_thread("muster-receives", [this, alive = owner_()] { work(); });
  lines_[tag].receives.push_back({deadline, std::move(attempt)});
  advance(lock, tag);
  if (lines_.empty()) return;
  news_.notify_all();
}

bool ReceiveQueue::has(int tag) {
  const std::lock_guard lock(mutex_);
  return lines_.count(tag) > 0;
}

bool ReceiveQueue::advance(std::unique_lock<std::mutex>& lock, int tag) {
  Line& line = lines_[tag];  // not erased while it is busy
  if (line.busy) return false;
  line.busy = true;
  bool moved = false;
  while (!line.receives.empty()) {
    const Attempt& attempt = line.receives.front().attempt;  // a deque's references outlive a push at its end
    const Turn turn = stop_ ? Turn::kStop : Turn::kFirst;
    lock.unlock();
    const bool done = attempt(turn);
    lock.lock();
    if (!done && !stop_) break;
    if (!done) continue;  // the queue was stopped meanwhile
    moved = true;
    Attempt ended = std::move(line.receives.front().attempt);
    line.receives.pop_front();
    lock.unlock();
    ended = nullptr;  // without the lock, because it may hold the last reference to a work
    lock.lock();
  }
  line.busy = false;
  if (line.receives.empty()) lines_.erase(tag);
  return moved;
}

void ReceiveQueue::end_late(std::unique_lock<std::mutex>& lock, int tag) {
  Line& line = lines_[tag];
  if (line.busy) return;
  line.busy = true;  // other threads only add to the line now
  for (size_t i = 1; i < line.receives.size();) {
    if (!line.receives[i].deadline.passed()) {
      ++i;
      continue;
    }
    Attempt late = std::move(line.receives[i].attempt);
    line.receives.erase(line.receives.begin() + static_cast<ptrdiff_t>(i));
    lock.unlock();
    late(Turn::kLate);
    late = nullptr;
    lock.lock();
  }
  line.busy = false;
}

void ReceiveQueue::work() {
  std::unique_lock lock(mutex_);
  auto since = Clock::now();
  for (;;) {
    if (lines_.empty()) {
      if (stop_) return;
      news_.wait(lock, [this] { return stop_ || !lines_.empty(); });
      since = Clock::now();
    }
    std::vector<int> tags;
    for (const auto& [tag, line] : lines_) tags.push_back(tag);
    for (const int tag : tags) {
      if (lines_.count(tag) && advance(lock, tag)) since = Clock::now();
      if (lines_.count(tag)) end_late(lock, tag);
    }
    if (lines_.empty()) continue;
    const auto idle = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since) / kPatience;
    news_.wait_for(lock, std::clamp(idle, kShortest, kLongest));
  }
}

void ReceiveQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    news_.notify_all();
  }
  join_or_detach(thread_);
}

}  // namespace muster::comm::hierarchical_backend
