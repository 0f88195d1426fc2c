#include "comm/backends/hierarchical/receive_queue.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>
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
  if (!stop_) see_that_one_looks();
  lines_[tag].receives.push_back({deadline, std::move(attempt)});
  advance(lock, tag, /*looks=*/false);
  if (!lines_.empty()) news_.notify_all();
}

bool ReceiveQueue::has(int tag) {
  const std::lock_guard lock(mutex_);
  return lines_.count(tag) > 0;
}

bool ReceiveQueue::advance(std::unique_lock<std::mutex>& lock, int tag, bool looks) {
  bool moved = false;
  for (;;) {
    const auto found = lines_.find(tag);
    if (found == lines_.end() || found->second.busy) return moved;
    Line& line = found->second;  // not erased while it is busy
    line.busy = true;
    const Attempt& attempt = line.receives.front().attempt;  // a deque's references outlive a push at its end
    const Turn turn = stop_ ? Turn::kStop : Turn::kFirst;
    lock.unlock();
    Outcome outcome = attempt(turn);
    lock.lock();
    line.busy = false;
    if (!outcome.over) {
      if (!stop_) return moved;
      continue;  // the queue was stopped meanwhile
    }
    moved = true;
    Attempt ended = std::move(line.receives.front().attempt);
    line.receives.pop_front();
    if (line.receives.empty()) lines_.erase(found);
    finish(lock, std::move(ended), std::move(outcome.then), looks);
  }
}

void ReceiveQueue::end_late(std::unique_lock<std::mutex>& lock, int tag) {
  for (;;) {  // one at a time: another thread looks while this one finishes it
    const auto found = lines_.find(tag);
    if (found == lines_.end() || found->second.busy) return;
    auto& receives = found->second.receives;
    const auto late =
        std::find_if(receives.begin() + 1, receives.end(), [](const Receive& each) { return each.deadline.passed(); });
    if (late == receives.end()) return;
    Attempt attempt = std::move(late->attempt);
    receives.erase(late);
    lock.unlock();
    Outcome outcome = attempt(Turn::kLate);
    lock.lock();
    finish(lock, std::move(attempt), std::move(outcome.then), /*looks=*/true);
  }
}

void ReceiveQueue::finish(std::unique_lock<std::mutex>& lock, Attempt attempt, std::function<void()> then, bool looks) {
  if (looks) {
    one_looks_ = false;
    try {
      if (!lines_.empty()) see_that_one_looks();
    } catch (const std::exception&) {  // no more threads can be had: what waits is looked for after the callbacks
    }
  }
  lock.unlock();
  attempt = nullptr;  // without the lock, because it may hold the last reference to a work
  if (then) then();
  then = nullptr;
  lock.lock();
  if (looks) {
    ++waiting_;
    begin_to_look(lock);
  }
}

void ReceiveQueue::see_that_one_looks() {
  if (one_looks_) return;
  if (waiting_ > 0) return turn_.notify_one();
  threads_.push_back(start_thread("muster-receives", [this, alive = owner_()] {
    std::unique_lock lock(mutex_);
    begin_to_look(lock);
    look(lock);
    one_looks_ = false;
    turn_.notify_all();
  }));
  ++waiting_;
}

void ReceiveQueue::begin_to_look(std::unique_lock<std::mutex>& lock) {
  turn_.wait(lock, [this] { return !one_looks_; });
  --waiting_;
  one_looks_ = true;
}

void ReceiveQueue::look(std::unique_lock<std::mutex>& lock) {
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
      if (advance(lock, tag, /*looks=*/true)) since = Clock::now();
      end_late(lock, tag);
    }
    if (lines_.empty()) continue;
    const auto idle = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since) / kPatience;
    news_.wait_for(lock, std::clamp(idle, kShortest, kLongest));
  }
}

void ReceiveQueue::stop() {
  std::unique_lock lock(mutex_);
  stop_ = true;
  news_.notify_all();
  turn_.notify_all();
  while (!threads_.empty()) {  // until they end, they may start others
    auto threads = std::exchange(threads_, {});
    lock.unlock();
    for (auto& thread : threads) join_or_detach(thread);
    lock.lock();
  }
}

}  // namespace muster::comm::hierarchical_backend
