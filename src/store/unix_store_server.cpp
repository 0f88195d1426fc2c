// A store served over a Unix-domain socket, by one thread of its own.
//
// The sockets are made here, not by asio, so that each is close-on-exec from birth: a worker that the launcher starts
// must not hold the server's end of another's connection, or nobody would learn of the launcher's death.

#include "store/unix_store_server.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <asio/local/stream_protocol.hpp>
#include <cerrno>
#include <system_error>
#include <thread>

#include "base/fd.h"
#include "base/random.h"
#include "store/local_store.h"
#include "store/session.h"
#include "store/unix_address.h"

namespace muster {
namespace store {
namespace {

using Protocol = asio::local::stream_protocol;

UniqueFd listen_at(const UnixAddress& address) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_errno("cannot make a socket for the store");
  // On Linux the mode of a bound path is the mode of the socket at bind(2), so nobody else can ever connect in between.
  if (::fchmod(socket.get(), 0600) != 0) throw_errno("fchmod of the store's socket");
  if (::bind(socket.get(), address.get(), address.size()) != 0)
    throw_errno(text("cannot serve a store at ", address.text()),
                errno != EADDRINUSE ? std::string()
                : address.is_path() ? "Another server is there, or one that was killed left the file: then remove it"
                                    : "Another server has that name; choose another");
  if (::listen(socket.get(), SOMAXCONN) != 0) throw_errno(text("cannot listen at ", address.text()));
  return socket;
}

// Closed, with a line in the log, before a byte of it is read.
bool admit(int connection, std::string* peer) {
  const ucred who = peer_of(connection);
  *peer = text("process ", who.pid);
  if (who.uid == ::geteuid()) return true;
  MUSTER_LOG(kWarning) << "store: refused a connection from process " << who.pid << " of user " << who.uid;
  return false;
}

asio::awaitable<void> accept_clients(Protocol::acceptor acceptor, std::shared_ptr<SharedTable> table,
                                     std::shared_ptr<Mailbox> mailbox) {
  asio::steady_timer pause(acceptor.get_executor());
  for (;;) {
    UniqueFd connection(::accept4(acceptor.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection) {
      const int error = errno;
      if (error == EINTR || error == ECONNABORTED) continue;
      if (error == EAGAIN) {
        co_await acceptor.async_wait(Protocol::acceptor::wait_read, asio::use_awaitable);
        continue;
      }
      // Out of descriptors or memory: clients wait in the backlog until some are free.
      MUSTER_LOG(kError) << "store: cannot accept a connection: " << std::generic_category().message(error);
      pause.expires_after(std::chrono::milliseconds(100));
      co_await pause.async_wait(asio::use_awaitable);
      continue;
    }
    try {
      std::string peer;
      if (!admit(connection.get(), &peer)) continue;
      Protocol::socket stream(acceptor.get_executor());
      stream.assign(Protocol(), connection.get());
      connection.release();
      auto session = std::make_shared<Session<Protocol::socket>>(std::move(stream), std::move(peer), table, mailbox);
      asio::co_spawn(acceptor.get_executor(), serve(std::move(session)), [](std::exception_ptr) {});
    } catch (const std::exception& error) {
      MUSTER_LOG(kError) << "store: dropped a new connection: " << error.what();
    }
  }
}

class UnixStoreServer final : public StoreServer {
 public:
  UnixStoreServer(const UnixAddress& address, std::shared_ptr<SharedTable> table)
      : socket_name_(address), address_(address.text()), pid_(::getpid()), table_(std::move(table)) {
    UniqueFd listening = listen_at(address);
    if (address.is_path() && ::stat(address.name().c_str(), &file_) != 0) throw_errno(text("cannot stat ", address_));
    Protocol::acceptor acceptor(*io_);
    acceptor.assign(Protocol(), listening.get());
    listening.release();
    asio::co_spawn(*io_, accept_clients(std::move(acceptor), table_, mailbox_), [](std::exception_ptr error) {
      if (error) {
        MUSTER_LOG(kError) << "store: the server accepts no more connections";
      }
    });
    start_thread();
  }

  ~UnixStoreServer() override {
    if (::getpid() != pid_) {
      // A child forked without exec: the thread and the connections are the parent's. Neither may be touched.
      thread_.detach();
      static_cast<void>(io_.release());
      return;
    }
    mailbox_->close();
    io_->stop();
    thread_.join();
    io_.reset();  // destroys the coroutines, and with them the sessions, which closes their connections
    struct stat now {};
    const char* path = socket_name_.name().c_str();
    if (socket_name_.is_path() && ::stat(path, &now) == 0 && now.st_ino == file_.st_ino && now.st_dev == file_.st_dev)
      ::unlink(path);
  }

  const std::string& address() const override { return address_; }
  std::shared_ptr<Store> local() override { return make_local_store(table_); }

 private:
  void start_thread() {
    // The thread takes no signals: they are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      thread_ = std::thread([io = io_.get()] { io->run(); });
    } catch (const std::system_error& error) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw Unavailable(text("cannot start the store server's thread: ", error.what()));
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  UnixAddress socket_name_;
  std::string address_;
  pid_t pid_;
  struct stat file_ {};  // which file is ours to remove
  std::shared_ptr<SharedTable> table_;
  std::unique_ptr<asio::io_context> io_ = std::make_unique<asio::io_context>(1);
  std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>(*io_);
  std::thread thread_;
};

}  // namespace

std::unique_ptr<StoreServer> serve_table(std::string_view name, std::shared_ptr<SharedTable> table) {
  const std::string chosen = name.empty() ? "@muster-" + random_hex(16) : std::string(name);
  return std::make_unique<UnixStoreServer>(UnixAddress(chosen), std::move(table));
}

}  // namespace store

std::unique_ptr<StoreServer> serve_store(std::string_view name) {
  return store::serve_table(name, std::make_shared<store::SharedTable>());
}

}  // namespace muster
