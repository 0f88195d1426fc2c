// Passes tasks from any thread to the server's thread. Safe also while the server is destroyed.
//
// Thread-safety: all functions.
#pragma once

#include <asio/io_context.hpp>
#include <asio/post.hpp>
#include <mutex>
#include <utility>

namespace muster::store {

class TaskPoster {
 public:
  explicit TaskPoster(asio::io_context& io) : io_(&io) {}

  // Runs `task` on the server's thread, later; drops it if this is closed.
  template <typename Task>
  void post(Task&& task) {
    std::lock_guard lock(mutex_);  // asio::post never runs the task itself
    if (io_) asio::post(*io_, std::forward<Task>(task));
  }

  void close() {
    std::lock_guard lock(mutex_);
    io_ = nullptr;
  }

 private:
  std::mutex mutex_;
  asio::io_context* io_;  // null once closed
};

}  // namespace muster::store
