// A queue of collectives that a job holds: it has begun, and does not end before the test says so.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <utility>

#include "comm/kit/collective_queue.h"

namespace muster::test {

// The job runs on the queue's own thread. `last`: what it does when it is released.
class HeldQueue {
 public:
  explicit HeldQueue(
      comm::CollectiveQueue& queue, const std::function<void()>& last = [] {}) {
    const auto began = std::make_shared<std::promise<void>>();
    queue.submit([began, last, go_on = go_on_.get_future().share()](bool) {
      began->set_value();
      go_on.wait();
      last();
      return false;
    });
    began->get_future().wait();
  }
  HeldQueue(const HeldQueue&) = delete;
  HeldQueue& operator=(const HeldQueue&) = delete;
  ~HeldQueue() { release(); }
  void release() {
    if (!std::exchange(released_, true)) go_on_.set_value();
  }

 private:
  std::promise<void> go_on_;
  bool released_ = false;
};

}  // namespace muster::test
