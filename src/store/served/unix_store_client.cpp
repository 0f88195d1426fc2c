// Connections to a store's server on this host, over a Unix-domain socket. The kernel says who serves there.

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/fd.h"
#include "base/text.h"
#include "store/address/unix_address.h"
#include "store/served/addresses.h"
#include "store/served/served_store.h"

namespace muster::store {
namespace {

class UnixDialer final : public Dialer {
 public:
  explicit UnixDialer(UnixAddress address) : address_(std::move(address)) {}

  std::string address() const override { return address_.text(); }

  Dialed dial(Deadline) override {
    UniqueFd connection(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!connection) throw_errno("cannot make a socket for the store");
    while (::connect(connection.get(), address_.get(), address_.size()) != 0) {
      const int error = errno;
      if (error == EINTR) continue;
      if (error == EAGAIN) return {nullptr, true, {}};  // too many clients are about to connect
      if (error == ECONNREFUSED || error == ENOENT) return {};
      if (error == EACCES || error == EPERM)
        throw Unauthorized(text("the store at ", address_.text(), " may not be used by user ", ::geteuid()),
                           "Run all of a job as one user");
      throw_errno(error, text("cannot connect to the store at ", address_.text()));
    }
    const ucred server = peer_of(connection.get());
    if (server.uid != ::geteuid())
      throw Unauthorized(
          text("the store at ", address_.text(), " is served by user ", server.uid, ", and this is user ", ::geteuid()),
          "Run all of a job as one user");
    return {std::make_unique<ClientStream>(std::move(connection)), false, {}};
  }

 private:
  const UnixAddress address_;
};

}  // namespace

std::shared_ptr<Store> connect_unix(std::string_view address, Deadline deadline) {
  return make_served_store(std::make_unique<UnixDialer>(UnixAddress::parse(address)), deadline);
}

}  // namespace muster::store
