#include "store/served/server_thread.h"

#include <unistd.h>

#include "base/thread.h"

namespace muster::store {

ServerThread::ServerThread()
    : pid_(::getpid()), io_(std::make_unique<asio::io_context>(1)), tasks_(std::make_shared<TaskPoster>(*io_)) {}

bool ServerThread::is_mine() const { return ::getpid() == pid_; }

void ServerThread::start() {
  thread_ = start_thread("muster-store", [io = io_.get()] { io->run(); });
}

void ServerThread::stop() {
  if (!io_) return;
  if (!is_mine()) {
    if (thread_.joinable()) thread_.detach();
    static_cast<void>(io_.release());
    return;
  }
  tasks_->close();
  io_->stop();
  if (thread_.joinable()) thread_.join();
  io_.reset();  // destroys the coroutines, and with them the sessions, which closes their connections
}

}  // namespace muster::store
