// A store served over TLS (tls.h) to processes on any host, by one thread of its own.
//
// A client gets a session when its handshake has proved that it knows the secret. Until then the client has only
// OpenSSL's TLS connection, with a time limit, and the server reads no byte of the store's protocol. At most
// kMaxHandshakes are under way; further connections wait in the kernel's backlog, so a flood of them costs a bounded
// amount of memory and descriptors. The server logs one refusal per address, for at most kMaxLogged addresses.

#include <asio/ip/tcp.hpp>
#include <asio/ssl/stream.hpp>
#include <chrono>
#include <utility>

#include "base/fd.h"
#include "base/first_of_each.h"
#include "store/address/tcp_address.h"
#include "store/served/addresses.h"
#include "store/served/server_thread.h"
#include "store/served/session.h"
#include "store/served/tls.h"
#include "store/table/local_store.h"

namespace muster::store {
namespace {

using Tcp = asio::ip::tcp;
using TlsStream = asio::ssl::stream<Tcp::socket>;

constexpr std::chrono::seconds kHandshakeLimit{5};
constexpr int kMaxHandshakes = 64;
constexpr size_t kMaxLogged = 256;

// What all connections that have not proved the secret share. Only the server's thread uses it.
struct Door {
  Door(ServerThread& thread, const TlsContext& tls, std::shared_ptr<SharedTable> table)
      : tls(tls), table(std::move(table)), tasks(thread.tasks()), room(thread.io()) {}

  void refuse(const std::string& host, const std::string& why) {
    if (!is_first_refusal(host)) return;
    MUSTER_LOG(kWarning) << "store: refused a connection from " << host
                         << ", which did not prove that it knows the job's "
                         << "secret (" << why << "). Further refusals from there are not logged";
    if (is_first_refusal.full()) {
      MUSTER_LOG(kWarning) << "store: connections from " << kMaxLogged << " addresses were refused; no more are logged";
    }
  }

  const TlsContext& tls;
  std::shared_ptr<SharedTable> table;
  std::shared_ptr<TaskPoster> tasks;
  const std::shared_ptr<Answers> answers = std::make_shared<Answers>();
  int handshakes = 0;
  asio::steady_timer room;  // cancelled when a handshake ends
  FirstOfEach<std::string> is_first_refusal{kMaxLogged};
};

// Holds one of the kMaxHandshakes places while it lives.
class Place {
 public:
  explicit Place(std::shared_ptr<Door> door) : door_(std::move(door)) { ++door_->handshakes; }
  Place(Place&& other) noexcept = default;
  Place& operator=(Place&&) = delete;
  ~Place() {
    if (!door_) return;
    --door_->handshakes;
    door_->room.cancel();
  }

 private:
  std::shared_ptr<Door> door_;
};

// Closes a stream after kHandshakeLimit, unless call_off() comes first.
class Limit {
 public:
  explicit Limit(const std::shared_ptr<TlsStream>& stream) : timer_(stream->get_executor(), kHandshakeLimit) {
    timer_.async_wait([weak = std::weak_ptr(stream), over = over_](const asio::error_code& error) {
      const auto late = weak.lock();
      if (error || *over || !late) return;
      *over = true;
      asio::error_code ignored;
      late->lowest_layer().close(ignored);
    });
  }
  // Returns whether the time was over already.
  bool call_off() {
    const bool was_over = std::exchange(*over_, true);
    timer_.cancel();
    return was_over;
  }

 private:
  std::shared_ptr<bool> over_ = std::make_shared<bool>(false);  // the timer's call may be on its way already
  asio::steady_timer timer_;
};

// Performs the handshake. Returns why it failed; empty if it succeeded.
asio::awaitable<std::string> shake_hands(std::shared_ptr<TlsStream> stream) {
  Limit limit(stream);
  asio::error_code error;
  co_await stream->async_handshake(TlsStream::server, asio::redirect_error(asio::use_awaitable, error));
  if (limit.call_off()) co_return "it took too long";
  if (error) co_return error.message();
  if (!TlsContext::is_proved(stream->native_handle())) co_return "it offered no key";
  co_return "";
}

asio::awaitable<void> receive(std::shared_ptr<TlsStream> stream, SocketAddress peer, std::shared_ptr<Door> door,
                              Place place) {
  const std::string why = co_await shake_hands(stream);
  if (!why.empty()) {
    door->refuse(peer.host(), why);
    co_return;
  }
  auto session = std::make_shared<Session<TlsStream>>(std::move(*stream), text(peer.host(), " port ", peer.port()),
                                                      door->table, door->tasks, door->answers);
  asio::co_spawn(session->stream.get_executor(), serve(session), [](std::exception_ptr) {});
}

asio::awaitable<void> accept_clients(Tcp::acceptor acceptor, std::shared_ptr<Door> door) {
  for (;;) {
    while (door->handshakes >= kMaxHandshakes) {
      asio::error_code ignored;
      door->room.expires_at(Deadline::never().when());
      co_await door->room.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    }
    UniqueFd connection = co_await accept_next(acceptor);
    try {
      set_tcp_options(connection.get());
      const auto peer = SocketAddress::of_peer(connection.get());
      if (peer.family() == AF_UNSPEC) continue;  // gone already
      Tcp::socket socket(acceptor.get_executor());
      socket.assign(peer.family() == AF_INET ? Tcp::v4() : Tcp::v6(), connection.get());
      connection.release();
      auto stream = std::make_shared<TlsStream>(std::move(socket), door->tls.make_connection().release());
      asio::co_spawn(acceptor.get_executor(), receive(std::move(stream), peer, door, Place(door)),
                     [](std::exception_ptr) {});
    } catch (const std::exception& error) {
      MUSTER_LOG(kError) << "store: dropped a new connection: " << error.what();
    }
  }
}

class TlsStoreServer final : public StoreServer {
 public:
  TlsStoreServer(const TcpAddress& address, const Secret& secret, std::shared_ptr<SharedTable> table)
      : table_(std::move(table)), tls_(secret, TlsContext::Side::kServer) {
    UniqueFd listening = listen_tcp(address);
    const auto own = SocketAddress::of(listening.get());
    address_ = text(kTlsScheme, TcpAddress{address.host, own.port()}.text());
    Tcp::acceptor acceptor(thread_.io());
    acceptor.assign(own.family() == AF_INET ? Tcp::v4() : Tcp::v6(), listening.get());
    listening.release();
    asio::co_spawn(thread_.io(), accept_clients(std::move(acceptor), std::make_shared<Door>(thread_, tls_, table_)),
                   [](std::exception_ptr error) {
                     if (error) {
                       MUSTER_LOG(kError) << "store: the server accepts no more connections";
                     }
                   });
    thread_.start();
  }

  const std::string& address() const override { return address_; }
  std::shared_ptr<Store> local() override { return make_local_store(table_); }

 private:
  std::string address_;
  std::shared_ptr<SharedTable> table_;
  TlsContext tls_;
  ServerThread thread_;  // last: ends before what its connections use
};

}  // namespace

std::unique_ptr<StoreServer> serve_tls(std::string_view address, const Secret& secret,
                                       std::shared_ptr<SharedTable> table) {
  const auto where = TcpAddress::parse(address.substr(kTlsScheme.size()), address);
  return std::make_unique<TlsStoreServer>(where, secret, std::move(table));
}

}  // namespace muster::store
