// A store served over a Unix-domain socket, by one thread of its own.

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <asio/local/stream_protocol.hpp>
#include <cerrno>

#include "base/fd.h"
#include "base/first_of_each.h"
#include "base/random.h"
#include "store/address/unix_address.h"
#include "store/served/addresses.h"
#include "store/served/server_thread.h"
#include "store/served/session.h"
#include "store/table/local_store.h"

namespace muster::store {
namespace {

using Protocol = asio::local::stream_protocol;

UniqueFd listen_at(const UnixAddress& address) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_errno("cannot make a socket for the store");
  // On Linux the mode of a bound path is the mode of the socket at bind(2), so no other user can connect in between.
  if (::fchmod(socket.get(), 0600) != 0) throw_errno("fchmod of the store's socket");
  if (::bind(socket.get(), address.get(), address.size()) != 0)
    throw_errno(text("cannot serve a store at ", address.text()),
                errno != EADDRINUSE ? std::string()
                : address.is_path() ? "Another server is there, or one that was killed left the file: then remove it"
                                    : "Another server has that name; choose another");
  if (::listen(socket.get(), SOMAXCONN) != 0) throw_errno(text("cannot listen at ", address.text()));
  return socket;
}

// Lets in processes of the server's own user. Connections of others are closed before a byte of them is read. The
// first one of each user is logged, of 64 users: so other users cannot fill the log.
class UserDoor {
 public:
  bool admit(int connection, std::string* peer) {
    const ucred who = peer_of(connection);
    *peer = text("process ", who.pid);
    if (who.uid == ::geteuid()) return true;
    if (is_first_refusal_(who.uid)) {
      MUSTER_LOG(kWarning) << "store: refused a connection from process " << who.pid << " of user " << who.uid
                           << ". Further ones of that user are refused without a word";
    }
    return false;
  }

 private:
  FirstOfEach<uid_t> is_first_refusal_{64};
};

asio::awaitable<void> accept_clients(Protocol::acceptor acceptor, std::shared_ptr<SharedTable> table,
                                     std::shared_ptr<TaskPoster> tasks) {
  UserDoor door;
  for (;;) {
    UniqueFd connection = co_await accept_next(acceptor);
    try {
      std::string peer;
      if (!door.admit(connection.get(), &peer)) continue;
      Protocol::socket stream(acceptor.get_executor());
      stream.assign(Protocol(), connection.get());
      connection.release();
      auto session = std::make_shared<Session<Protocol::socket>>(std::move(stream), std::move(peer), table, tasks);
      asio::co_spawn(acceptor.get_executor(), serve(std::move(session)), [](std::exception_ptr) {});
    } catch (const std::exception& error) {
      MUSTER_LOG(kError) << "store: dropped a new connection: " << error.what();
    }
  }
}

class UnixStoreServer final : public StoreServer {
 public:
  UnixStoreServer(const UnixAddress& address, std::shared_ptr<SharedTable> table)
      : socket_name_(address), address_(address.text()), table_(std::move(table)) {
    UniqueFd listening = listen_at(address);
    if (address.is_path() && ::stat(address.name().c_str(), &file_) != 0) throw_errno(text("cannot stat ", address_));
    Protocol::acceptor acceptor(thread_.io());
    acceptor.assign(Protocol(), listening.get());
    listening.release();
    asio::co_spawn(thread_.io(), accept_clients(std::move(acceptor), table_, thread_.tasks()),
                   [](std::exception_ptr error) {
                     if (error) {
                       MUSTER_LOG(kError) << "store: the server accepts no more connections";
                     }
                   });
    thread_.start();
  }

  ~UnixStoreServer() override {
    if (!thread_.is_mine()) return;
    thread_.stop();
    struct stat now {};
    const char* path = socket_name_.name().c_str();
    if (socket_name_.is_path() && ::stat(path, &now) == 0 && now.st_ino == file_.st_ino && now.st_dev == file_.st_dev)
      ::unlink(path);
  }

  const std::string& address() const override { return address_; }
  std::shared_ptr<Store> local() override { return make_local_store(table_); }

 private:
  UnixAddress socket_name_;
  std::string address_;
  struct stat file_ {};  // which file is ours to remove
  std::shared_ptr<SharedTable> table_;
  ServerThread thread_;
};

}  // namespace

std::unique_ptr<StoreServer> serve_unix(std::string_view name, std::shared_ptr<SharedTable> table) {
  const std::string chosen = name.empty() ? "@muster-" + random_hex(16) : std::string(name);
  return std::make_unique<UnixStoreServer>(UnixAddress(chosen), std::move(table));
}

}  // namespace muster::store
