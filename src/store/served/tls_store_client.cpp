// Connections to a store's server on any host, over TLS (tls.h).
//
// OpenSSL reads and writes through our own BIO. OpenSSL's BIO uses write(2), so SIGPIPE would end the program when the
// server has gone.

#include <openssl/bio.h>
#include <openssl/err.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <limits>
#include <system_error>
#include <utility>

#include "base/fd.h"
#include "base/text.h"
#include "store/address/tcp_address.h"
#include "store/kit/await_ready.h"
#include "store/served/addresses.h"
#include "store/served/served_store.h"
#include "store/served/tls.h"

namespace muster::store {
namespace {

int socket_of(BIO* bio) { return static_cast<int>(reinterpret_cast<intptr_t>(::BIO_get_data(bio))); }
bool is_for_later(int error) { return error == EAGAIN || error == EINTR; }

int bio_write(BIO* bio, const char* bytes, int size) {
  BIO_clear_retry_flags(bio);
  const ssize_t n = ::send(socket_of(bio), bytes, static_cast<size_t>(size), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n < 0 && is_for_later(errno)) BIO_set_retry_write(bio);
  return static_cast<int>(n);
}

int bio_read(BIO* bio, char* to, int size) {
  BIO_clear_retry_flags(bio);
  const ssize_t n = ::recv(socket_of(bio), to, static_cast<size_t>(size), MSG_DONTWAIT);
  if (n < 0 && is_for_later(errno)) BIO_set_retry_read(bio);
  return static_cast<int>(n);
}

long bio_ctrl(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

// A BIO on a socket that the caller closes.
BIO* make_bio(int socket) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = ::BIO_meth_new(::BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "muster socket");
    if (made) {
      ::BIO_meth_set_write(made, bio_write);
      ::BIO_meth_set_read(made, bio_read);
      ::BIO_meth_set_ctrl(made, bio_ctrl);
    }
    return made;
  }();
  BIO* bio = method ? ::BIO_new(method) : nullptr;
  if (!bio) throw Unavailable("there is no memory for a connection to the store");
  ::BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(socket)));
  ::BIO_set_init(bio, 1);
  return bio;
}

class TlsClientStream final : public ClientStream {
 public:
  TlsClientStream(UniqueFd socket, TlsPtr tls) : ClientStream(std::move(socket)), tls_(std::move(tls)) {
    BIO* bio = make_bio(fd());
    ::SSL_set_bio(tls_.get(), bio, bio);
  }

  ssize_t send_some(std::string_view bytes, short* events) override {
    return moved(::SSL_write(prepared(), bytes.data(), limited(bytes.size())), events);
  }
  ssize_t receive_some(std::span<char> to, short* events) override {
    return moved(::SSL_read(prepared(), to.data(), limited(to.size())), events);
  }
  bool has_received() const override { return ::SSL_pending(tls_.get()) > 0; }

  // Returns 1 if the handshake is done, 0 if it has to wait until the socket is ready for `*events`, and kGone if it
  // failed: `*refusal` says why, or is empty if the other side only closed the connection.
  int shake_hands(short* events, std::string* refusal) {
    const int result = ::SSL_connect(prepared());
    if (result == 1) {
      if (TlsContext::is_proved(tls_.get())) return 1;
      *refusal = "it did not prove that it knows the secret";
      return kGone;
    }
    const bool is_protocol = ::SSL_get_error(tls_.get(), result) == SSL_ERROR_SSL;
    const unsigned long error = ::ERR_peek_error();
    const auto outcome = moved(result, events);
    if (outcome == kGone && is_protocol && ERR_GET_REASON(error) != SSL_R_UNEXPECTED_EOF_WHILE_READING) {
      const char* reason = ::ERR_reason_error_string(error);
      *refusal = reason ? reason : "a message that is not TLS 1.3";
    }
    return static_cast<int>(outcome);
  }

 private:
  // SSL_get_error() also looks at this thread's earlier errors, so they are cleared before each operation.
  SSL* prepared() const {
    ::ERR_clear_error();
    return tls_.get();
  }
  static int limited(size_t size) { return static_cast<int>(std::min<size_t>(size, std::numeric_limits<int>::max())); }
  ssize_t moved(int result, short* events) const {
    if (result > 0) return result;
    switch (::SSL_get_error(tls_.get(), result)) {
      case SSL_ERROR_WANT_READ:
        *events = POLLIN;
        return 0;
      case SSL_ERROR_WANT_WRITE:
        *events = POLLOUT;
        return 0;
      default:
        return kGone;
    }
  }

  TlsPtr tls_;
};

class TlsDialer final : public Dialer {
 public:
  TlsDialer(std::string_view address, const Secret& secret)
      : address_(TcpAddress::parse(address.substr(kTlsScheme.size()), address)),
        tls_(secret, TlsContext::Side::kClient) {
    if (address_.port == 0)
      throw InvalidArgument(text(address, " has port 0, where nobody can serve"),
                            "Name the port that the server has; StoreServer::address() says which");
  }

  std::string address() const override { return text(kTlsScheme, address_.text()); }
  std::string advice() const override {
    return "Look whether the process that serves it runs, whether the address is right, and whether a firewall lets "
           "its port through";
  }

  std::chrono::milliseconds patience() const override { return kCut; }

  Dialed dial(Deadline deadline) override {
    Resolved found;
    if (known_.size() > 0) {
      found.addresses = {known_};
    } else {
      found = resolve(address_, deadline);
    }
    Dialed none{nullptr, false, found.reason};
    for (size_t i = 0; i < found.addresses.size(); ++i) {
      const auto& where = found.addresses[i];
      // If there are several addresses, one that does not answer must leave time for the others.
      const bool last = i + 1 == found.addresses.size();
      const Deadline mine =
          last ? deadline : Deadline::after(std::min<std::chrono::nanoseconds>(deadline.left() / 2, kPatience));
      int error = 0;
      UniqueFd socket = dial_tcp(where, mine, &error);
      if (!socket) {
        none.reason = std::generic_category().message(error);
        none.cut = error != ECONNREFUSED;
        continue;
      }
      auto connection = std::make_unique<TlsClientStream>(std::move(socket), tls_.make_connection());
      if (!shake_hands(*connection, deadline)) return {nullptr, true, "it closes connections immediately"};
      // Written once, by the store's constructor, when no other thread can use it.
      if (known_.size() == 0) known_ = where;
      return {std::move(connection), false, {}};
    }
    return none;
  }

 private:
  static constexpr std::chrono::seconds kPatience{3};
  static constexpr std::chrono::seconds kCut{5};  // as long as the launchers of other hosts wait for a sign of life

  // Returns false if the other side closed the connection, because it ends or has too many connections.
  bool shake_hands(TlsClientStream& connection, Deadline deadline) const {
    for (;;) {
      short events = 0;
      std::string refusal;
      const int result = connection.shake_hands(&events, &refusal);
      if (result == 1) return true;
      if (!refusal.empty())
        throw Unauthorized(text("the store at ", address(), " and this process do not have the same secret: ", refusal),
                           "Give all of a job the same MUSTER_SECRET or secret file, and look whether that is the "
                           "store's address and not another service's");
      if (result == ClientStream::kGone) return false;
      if (!await_ready(connection.fd(), events, deadline))
        throw TimeoutError(text("the store at ", address(), " did not answer in time"), {},
                           "The process that serves it may be stopped or overloaded");
    }
  }

  const TcpAddress address_;
  const TlsContext tls_;
  SocketAddress known_;  // where it was found
};

}  // namespace

std::shared_ptr<Store> connect_tls(std::string_view address, const Secret& secret, Deadline deadline) {
  return make_served_store(std::make_unique<TlsDialer>(address, secret), deadline);
}

}  // namespace muster::store
