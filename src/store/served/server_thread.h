// The thread on which a store's server serves its connections, and how it accepts them.
//
// This code, not asio, makes the sockets, so that each is close-on-exec from the beginning. If a worker that the
// launcher starts held the server's end of another worker's connection, nobody would notice the launcher's death.
//
// Thread-safety: belongs to the thread that made it; what runs on io() runs on the server's thread.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <asio/awaitable.hpp>
#include <asio/basic_socket_acceptor.hpp>
#include <asio/io_context.hpp>
#include <asio/steady_timer.hpp>
#include <asio/use_awaitable.hpp>
#include <cerrno>
#include <chrono>
#include <memory>
#include <system_error>
#include <thread>

#include "base/fd.h"
#include "base/log.h"
#include "store/served/task_poster.h"

namespace muster::store {

class ServerThread {
 public:
  ServerThread();
  ~ServerThread() { stop(); }
  ServerThread(const ServerThread&) = delete;
  ServerThread& operator=(const ServerThread&) = delete;

  asio::io_context& io() { return *io_; }
  const std::shared_ptr<TaskPoster>& tasks() const { return tasks_; }

  // Begins to run what was spawned on io(). Unavailable if no thread can be started.
  void start();
  // Ends the thread and destroys what runs on io(), which closes all connections. In a child forked without exec it
  // does neither: thread and connections are the parent's.
  void stop();
  bool is_mine() const;

 private:
  const pid_t pid_;
  std::unique_ptr<asio::io_context> io_;
  std::shared_ptr<TaskPoster> tasks_;
  std::thread thread_;
};

// Returns the next connection. While there are no free descriptors or no memory, it waits: clients stay in the backlog.
template <typename Protocol>
asio::awaitable<UniqueFd> accept_next(asio::basic_socket_acceptor<Protocol>& acceptor) {
  for (;;) {
    UniqueFd connection(::accept4(acceptor.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (connection) co_return connection;
    const int error = errno;
    if (error == EAGAIN) {
      co_await acceptor.async_wait(asio::socket_base::wait_read, asio::use_awaitable);
    } else if (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM || error == EBADF ||
               error == EINVAL || error == ENOTSOCK) {
      MUSTER_LOG(kError) << "store: cannot accept a connection: " << std::generic_category().message(error);
      asio::steady_timer pause(acceptor.get_executor(), std::chrono::milliseconds(100));
      co_await pause.async_wait(asio::use_awaitable);
    }  // otherwise the error concerns only that connection, or it was a signal
  }
}

}  // namespace muster::store
