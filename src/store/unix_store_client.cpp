// A store that another process serves over a Unix-domain socket.
//
// A call takes an idle connection, or makes one where all are in use, sends its request and waits for the reply with
// poll(2); so a thread that waits blocks no other, and the client needs no thread. A connection whose call failed is
// closed: nobody knows what it would say next.
//
// Idle connections lie in a fixed array of atomics rather than under a mutex, each with the process that opened it. So
// a child of fork(2) finds no mutex that another thread held, and closes its copies of the parent's connections instead
// of using them.

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/fd.h"
#include "base/text.h"
#include "muster/store/store.h"
#include "store/protocol.h"
#include "store/quote.h"
#include "store/unix_address.h"

namespace muster {
namespace store {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kCallTimeout{60'000};  // for calls that take no deadline
// A wait's answer, also "too late", comes from the server, which knows what is missing. We listen longer by this.
constexpr milliseconds kSlack{500};
constexpr milliseconds kMaxBackOff{50};

class IdleConnections {
 public:
  ~IdleConnections() {
    while (take()) {
    }
  }

  UniqueFd take() {
    const auto me = static_cast<uint32_t>(::getpid());
    for (auto& slot : slots_) {
      if (slot.load(std::memory_order_relaxed) == kEmpty) continue;
      const uint64_t taken = slot.exchange(kEmpty, std::memory_order_acquire);
      if (taken == kEmpty) continue;
      UniqueFd connection(static_cast<int>(static_cast<uint32_t>(taken)));
      if (taken >> 32 == me) return connection;
    }
    return UniqueFd();
  }

  // Closes it where there is no room.
  void give(UniqueFd connection) {
    const uint64_t mine = uint64_t{static_cast<uint32_t>(::getpid())} << 32 | static_cast<uint32_t>(connection.get());
    for (auto& slot : slots_) {
      uint64_t empty = kEmpty;
      if (slot.compare_exchange_strong(empty, mine, std::memory_order_release, std::memory_order_relaxed)) {
        connection.release();
        return;
      }
    }
  }

 private:
  static constexpr uint64_t kEmpty = 0;  // no process has the id 0
  std::array<std::atomic<uint64_t>, 8> slots_{};
};

class UnixStore final : public Store {
 public:
  UnixStore(UnixAddress address, Deadline deadline) : address_(std::move(address)) {
    for (auto pause = milliseconds(1);; pause = std::min(2 * pause, kMaxBackOff)) {
      if (auto connection = try_connect()) {
        idle_.give(std::move(connection));
        return;
      }
      if (deadline.passed())
        throw Unavailable(text("nobody serves the store at ", address_.text()),
                          "Is the launcher (muster run) that serves it still alive?");
      ::poll(nullptr, 0, deadline.poll_ms(pause));
    }
  }

  void set(std::string_view key, std::string_view value) override {
    Request request = about(Op::kSet, key);
    request.value = value;
    call(request);
  }
  std::string get(std::string_view key, Deadline deadline) override {
    auto reply = call_waiting(about(Op::kGet, key), deadline);
    if (!reply.value) throw Corrupt(text("the store at ", address_.text(), " answered without a value"));
    return *std::move(reply.value);
  }
  std::optional<std::string> try_get(std::string_view key) override { return call(about(Op::kTryGet, key)).value; }
  void wait(const std::vector<std::string>& keys, Deadline deadline) override {
    Request request;
    request.op = Op::kWait;
    request.keys = keys;
    call_waiting(std::move(request), deadline);
  }
  int64_t add(std::string_view key, int64_t delta) override {
    Request request = about(Op::kAdd, key);
    request.number = delta;
    return call(request).number;
  }
  Exchanged compare_set(std::string_view key, const std::optional<std::string>& expected,
                        std::string_view desired) override {
    Request request = about(Op::kCompareSet, key);
    request.expected = expected;
    request.value = desired;
    auto reply = call(request);
    return {reply.number != 0, std::move(reply.value)};
  }
  Versioned watch(std::string_view key, uint64_t after, Deadline deadline) override {
    Request request = about(Op::kWatch, key);
    request.number = static_cast<int64_t>(after);
    auto reply = call_waiting(std::move(request), deadline);
    return {std::move(reply.value), static_cast<uint64_t>(reply.number)};
  }
  bool erase(std::string_view key) override { return call(about(Op::kErase, key)).number != 0; }
  int64_t num_keys() override {
    Request request;
    request.op = Op::kNumKeys;
    return call(request).number;
  }

 private:
  static Request about(Op op, std::string_view key) {
    Request request;
    request.op = op;
    request.keys.emplace_back(key);
    return request;
  }

  Reply call(const Request& request) { return exchange(request, Deadline::after(kCallTimeout)); }

  Reply call_waiting(Request request, Deadline deadline) {
    request.wait_ms = wait_ms(deadline);
    return exchange(request, deadline.is_never() ? deadline : Deadline::after(deadline.left() + kSlack));
  }

  Reply exchange(const Request& request, Deadline deadline) {
    size_t size = request.value.size() + (request.expected ? request.expected->size() : 0);
    for (const auto& key : request.keys) size += key.size() + sizeof(uint32_t);
    static constexpr size_t kRoom = 1024;  // for the other fields of a request
    if (size > kMaxBody - kRoom)
      throw InvalidArgument(text("a request of ", size, " bytes is too long for the store"),
                            "Keep values below 64 MiB; data does not belong in the store");
    UniqueFd connection = idle_.take();
    if (!connection) connection = connect(deadline);
    send(connection.get(), encode(request), deadline);
    const std::string body = receive(connection.get(), request, deadline);
    Reply reply = decode_reply(body);
    idle_.give(std::move(connection));
    if (reply.error) throw_error(reply);
    return reply;
  }

  // Nothing where nobody serves (yet), or too many clients are about to connect.
  UniqueFd try_connect(int* reason = nullptr) const {
    UniqueFd connection(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!connection) throw_errno("cannot make a socket for the store");
    while (::connect(connection.get(), address_.get(), address_.size()) != 0) {
      const int error = errno;
      if (error == EINTR) continue;
      if (reason) *reason = error;
      if (error == ECONNREFUSED || error == ENOENT || error == EAGAIN) return UniqueFd();
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
    return connection;
  }

  // One more connection to a server that we had one to before.
  UniqueFd connect(Deadline deadline) const {
    for (auto pause = milliseconds(1);; pause = std::min(2 * pause, kMaxBackOff)) {
      int reason = 0;
      if (auto connection = try_connect(&reason)) return connection;
      if (reason != EAGAIN) throw_gone();
      if (deadline.passed()) throw Timeout(text("the store at ", address_.text(), " accepts no connection in time"));
      ::poll(nullptr, 0, deadline.poll_ms(pause));
    }
  }

  [[noreturn]] void throw_gone() const {
    throw Unavailable(text("the store at ", address_.text(), " went away"),
                      "The launcher (muster run) that served it has ended; its last lines may say why");
  }

  // Whether `connection` is ready for `events` before the deadline.
  static bool await(int connection, short events, Deadline deadline) {
    pollfd one{connection, events, 0};
    for (;;) {
      const int ready = ::poll(&one, 1, deadline.is_never() ? -1 : deadline.poll_ms());
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR && errno != EAGAIN) throw_errno("poll of the store's connection");
      if (ready <= 0 && deadline.passed()) return false;
    }
  }

  void send(int connection, const std::string& body, Deadline deadline) const {
    auto size = static_cast<uint32_t>(body.size());
    const size_t total = sizeof size + body.size();
    for (size_t sent = 0; sent < total;) {
      std::array<iovec, 2> parts{};
      size_t count = 0;
      if (sent < sizeof size) parts[count++] = {reinterpret_cast<char*>(&size) + sent, sizeof size - sent};
      const size_t from = sent < sizeof size ? 0 : sent - sizeof size;
      parts[count++] = {const_cast<char*>(body.data()) + from, body.size() - from};
      msghdr message{};
      message.msg_iov = parts.data();
      message.msg_iovlen = count;
      const ssize_t n = ::sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n >= 0) {
        sent += static_cast<size_t>(n);
      } else if (errno == EAGAIN) {
        if (!await(connection, POLLOUT, deadline))
          throw Timeout(text("the store at ", address_.text(), " did not take a request in time"));
      } else if (errno != EINTR) {
        throw_gone();
      }
    }
  }

  // At least one byte, at most `size`, into `to`.
  size_t receive_some(int connection, char* to, size_t size, const Request& request, Deadline deadline) const {
    for (;;) {
      if (!await(connection, POLLIN, deadline))
        throw Timeout(text("the store at ", address_.text(), " did not answer in time",
                           request.keys.empty() ? "" : text(", asked about ", quote(request.keys[0]))),
                      {}, "The process that serves it may be stopped or overloaded");
      const ssize_t n = ::recv(connection, to, size, MSG_DONTWAIT);
      if (n > 0) return static_cast<size_t>(n);
      if (n == 0 || (errno != EAGAIN && errno != EINTR)) throw_gone();
    }
  }

  // The body of the reply; most replies come in one piece.
  std::string receive(int connection, const Request& request, Deadline deadline) const {
    std::array<char, 4096> first;
    uint32_t size = 0;
    size_t got = 0;
    while (got < sizeof size)
      got += receive_some(connection, first.data() + got, first.size() - got, request, deadline);
    std::memcpy(&size, first.data(), sizeof size);
    got -= sizeof size;
    if (size > kMaxBody || got > size)
      throw Corrupt(text("the store at ", address_.text(), " sent what is not a reply"));
    std::string body(first.data() + sizeof size, got);
    body.resize(size);
    while (got < size) got += receive_some(connection, body.data() + got, size - got, request, deadline);
    return body;
  }

  const UnixAddress address_;
  IdleConnections idle_;
};

}  // namespace
}  // namespace store

std::shared_ptr<Store> connect_store(std::string_view address, Deadline deadline) {
  return std::make_shared<store::UnixStore>(store::UnixAddress::parse(address), deadline);
}

}  // namespace muster
