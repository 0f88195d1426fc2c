#include "store/served/served_store.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "base/random.h"
#include "base/text.h"
#include "store/kit/await_ready.h"
#include "store/kit/idle.h"
#include "store/kit/outage.h"
#include "store/kit/quote.h"
#include "store/served/protocol.h"

namespace muster::store {
namespace {

using std::chrono::milliseconds;
// How much longer than its deadline a wait listens. The server answers when the deadline has passed, because it knows
// which keys are missing.
constexpr milliseconds kSlack{2000};
constexpr milliseconds kMaxBackOff{50};

uint64_t random_number() {
  uint64_t number = 0;
  random_bytes(std::span(reinterpret_cast<unsigned char*>(&number), sizeof number));
  return number;
}

class ServedStore final : public Store, public Outage {
 public:
  ServedStore(std::unique_ptr<Dialer> dialer, Deadline deadline)
      : dialer_(std::move(dialer)), address_(dialer_->address()) {
    std::optional<std::string> reason;  // why the last attempt failed that did not run out of time
    for (auto pause = milliseconds(1);; pause = std::min(2 * pause, kMaxBackOff)) {
      Dialer::Dialed dialed;
      try {
        dialed = dialer_->dial(deadline);
      } catch (const TimeoutError&) {
        if (!reason) throw;
      }
      if (dialed.connection) {
        idle_.give(std::move(dialed.connection));
        return;
      }
      if (!reason || !deadline.passed()) reason = dialed.reason;
      if (!deadline.passed()) ::poll(nullptr, 0, deadline.poll_ms(pause));
      if (deadline.passed())  // another attempt would only fail because it has no time
        throw Unavailable(text("nobody serves the store at ", address_, reason->empty() ? "" : ": ", *reason),
                          dialer_->advice());
    }
  }

  void set(std::string_view key, std::string_view value) override {
    Request request = about(Op::kSet, key);
    request.value = value;
    call(request);
  }
  std::string get(std::string_view key, Deadline deadline) override {
    auto reply = call_waiting(about(Op::kGet, key), deadline);
    if (!reply.value) throw CorruptError(text("the store at ", address_, " answered without a value"));
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

  bool comes_again() const override { return false; }
  void set_call_timeout(milliseconds timeout) override { call_timeout_ = timeout; }

 private:
  static Request about(Op op, std::string_view key) {
    Request request;
    request.op = op;
    request.keys.emplace_back(key);
    return request;
  }

  Reply call(const Request& request) {
    return exchange(request, CallsBy::of_this_thread(Deadline::after(call_timeout_.load())));
  }

  Reply call_waiting(Request request, Deadline deadline) {
    request.wait_ms = wait_ms(deadline);
    return exchange(request, deadline.later(kSlack));
  }

  Reply exchange(Request request, Deadline deadline) {
    size_t size = request.value.size() + (request.expected ? request.expected->size() : 0);
    for (const auto& key : request.keys) size += key.size() + sizeof(uint32_t);
    static constexpr size_t kRoom = 1024;  // for the other fields of a request
    if (size > kMaxBody - kRoom)
      throw InvalidArgument(text("a request of ", size, " bytes is too long for the store"),
                            "Keep values below 64 MiB; data does not belong in the store");
    request.client = client_ ^ static_cast<uint64_t>(::getpid());  // a child of fork(2) is another one
    request.call = ++calls_;
    for (auto patience = Deadline::never();;) {
      auto connection = idle_.take();
      if (!connection) connection = connect(deadline, &patience);
      request.server = server_;
      try {
        send(*connection, frame(request), deadline);
        const std::string body = receive(*connection, request, deadline);
        Reply reply = decode_reply(body);
        uint64_t none = 0;
        server_.compare_exchange_strong(none, reply.server);  // the first one: another never takes its place
        idle_.give(std::move(connection));
        if (reply.error) throw_error(reply);
        return reply;
      } catch (const Cut&) {
        if (patience.is_never()) patience = Deadline::after(dialer_->patience());
        if (patience.passed()) throw_gone();
      }
      const bool ends = request.wait_ms != kForever &&
                        (request.op == Op::kGet || request.op == Op::kWait || request.op == Op::kWatch);
      if (ends)
        request.wait_ms = wait_ms(Deadline::after(std::max(deadline.left() - kSlack, std::chrono::nanoseconds(0))));
    }
  }

  // Makes another connection to the server. `*patience` is when to stop trying after a cut; it is never() until this
  // function, or its caller, first notices a cut.
  std::unique_ptr<ClientStream> connect(Deadline deadline, Deadline* patience) const {
    for (auto pause = milliseconds(1);; pause = std::min(2 * pause, kMaxBackOff)) {
      Deadline until = patience->when() < deadline.when() ? *patience : deadline;
      if (dialer_->patience() > milliseconds(0) && dialer_->patience() < until.left())
        until = Deadline::after(dialer_->patience());
      Dialer::Dialed dialed;
      try {
        dialed = dialer_->dial(until);
      } catch (const TimeoutError&) {  // a server took the connection, but did not answer: it is stopped, or busy
        if (deadline.passed()) throw;
        if (!patience->is_never()) throw_gone();
        continue;
      }
      if (dialed.connection) return std::move(dialed.connection);
      const bool may_heal = (dialed.cut || dialed.busy) && dialer_->patience() > milliseconds(0);
      if (may_heal && patience->is_never()) *patience = Deadline::after(dialer_->patience());
      if (!(dialed.busy || may_heal) || patience->passed()) throw_gone();
      if (deadline.passed()) throw TimeoutError(text("the store at ", address_, " accepts no connection in time"));
      ::poll(nullptr, 0, until.poll_ms(pause));
    }
  }

  // Thrown if a connection is cut. Whether the server still lives is unknown.
  struct Cut {};

  [[noreturn]] void throw_gone() const {
    throw Unavailable(
        text("the store at ", address_, " went away"),
        "The launcher (muster run) that served it has ended, or no network leads there any more; its last "
        "lines may say why");
  }

  void send(ClientStream& connection, std::string_view bytes, Deadline deadline) const {
    while (!bytes.empty()) {
      short events = POLLOUT;
      const ssize_t n = connection.send_some(bytes, &events);
      if (n == ClientStream::kGone) throw Cut();
      bytes.remove_prefix(static_cast<size_t>(n));
      if (n == 0 && events && !await_ready(connection.fd(), events, deadline))
        throw TimeoutError(text("the store at ", address_, " did not take a request in time"));
    }
  }

  // Receives at least one byte into `to`. Returns how many.
  size_t receive_some(ClientStream& connection, std::span<char> to, const Request& request, Deadline deadline) const {
    short events = connection.has_received() ? 0 : POLLIN;
    for (;;) {
      if (events && !await_ready(connection.fd(), events, deadline))
        throw TimeoutError(text("the store at ", address_, " did not answer in time",
                                request.keys.empty() ? "" : text(", asked about ", quote(request.keys[0]))),
                           {}, "The process that serves it may be stopped or overloaded");
      const ssize_t n = connection.receive_some(to, &events);
      if (n == ClientStream::kGone) throw Cut();
      if (n > 0) return static_cast<size_t>(n);
    }
  }

  // Receives a reply and returns its body. Most replies come in one piece.
  std::string receive(ClientStream& connection, const Request& request, Deadline deadline) const {
    std::array<char, 4096> first;
    uint32_t size = 0;
    size_t got = 0;
    while (got < sizeof size) got += receive_some(connection, std::span(first).subspan(got), request, deadline);
    std::memcpy(&size, first.data(), sizeof size);
    got -= sizeof size;
    if (size > kMaxBody || got > size) throw CorruptError(text("the store at ", address_, " sent what is not a reply"));
    std::string body(first.data() + sizeof size, got);
    body.resize(size);
    while (got < size) got += receive_some(connection, std::span(body).subspan(got), request, deadline);
    return body;
  }

  const std::unique_ptr<Dialer> dialer_;
  const std::string address_;
  const uint64_t client_ = random_number();
  std::atomic<uint64_t> calls_{0}, server_{0};
  std::atomic<milliseconds> call_timeout_{kCallTimeout};
  Idle<ClientStream> idle_;
};

// Converts a result of send(2) or recv(2) into a result of ClientStream.
ssize_t moved(ssize_t n, short wait_for, short* events) {
  if (n >= 0) return n;
  if (errno != EAGAIN && errno != EINTR) return ClientStream::kGone;
  *events = errno == EAGAIN ? wait_for : 0;
  return 0;
}

}  // namespace

ssize_t ClientStream::send_some(std::string_view bytes, short* events) {
  return moved(::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT), POLLOUT, events);
}

ssize_t ClientStream::receive_some(std::span<char> to, short* events) {
  const ssize_t n = ::recv(fd(), to.data(), to.size(), MSG_DONTWAIT);
  return n == 0 ? kGone : moved(n, POLLIN, events);
}

std::shared_ptr<Store> make_served_store(std::unique_ptr<Dialer> dialer, Deadline deadline) {
  return std::make_shared<ServedStore>(std::move(dialer), deadline);
}

}  // namespace muster::store
