#include "support/middleman.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "base/text.h"
#include "muster/base/deadline.h"
#include "store/address/tcp_address.h"

namespace muster::test {

using store::SocketAddress;
using store::TcpAddress;

Middleman::Middleman(uint16_t server)
    : server_(server),
      listening_(store::listen_tcp(TcpAddress{"127.0.0.1", 0})),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      port_(SocketAddress::of(listening_.get()).port()),
      thread_([this] { work(); }) {}

Middleman::~Middleman() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  thread_.join();
}

void Middleman::set(State state) {
  const std::lock_guard lock(mutex_);
  state_ = state;
  if (state == State::kDown) reset_all();
  wake();
}

void Middleman::cut() {
  const std::lock_guard lock(mutex_);
  reset_all();
  wake();
}

void Middleman::lose_next_answer() {
  const std::lock_guard lock(mutex_);
  lose_ = true;
}

size_t Middleman::connections() const {
  const std::lock_guard lock(mutex_);
  return pairs_.size();
}

size_t Middleman::cuts() const {
  const std::lock_guard lock(mutex_);
  return cuts_;
}

void Middleman::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const auto bytes = ::write(wake_.get(), &one, sizeof one);
}

// Closes with RST instead of FIN.
void Middleman::reset(UniqueFd& socket) {
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  if (socket) ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  socket.reset();
}

void Middleman::reset_all() {
  for (auto& pair : pairs_) {
    reset(pair.client);
    reset(pair.server);
    ++cuts_;
  }
  pairs_.clear();
}

void Middleman::accept_one() {
  UniqueFd client(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!client) return;
  UniqueFd server;
  if (state_ != State::kDown) {
    int error = 0;
    const auto where = store::resolve(TcpAddress{"127.0.0.1", server_}, Deadline::after(std::chrono::seconds(1)));
    if (!where.addresses.empty())
      server = store::dial_tcp(where.addresses[0], Deadline::after(std::chrono::seconds(1)), &error);
  }
  if (server) {
    pairs_.push_back({std::move(client), std::move(server)});
  } else {
    reset(client);
  }
}

void Middleman::forward(Pair& pair, bool from_server) {
  char buffer[16384];
  const UniqueFd &from = from_server ? pair.server : pair.client, &to = from_server ? pair.client : pair.server;
  const ssize_t size = ::recv(from.get(), buffer, sizeof buffer, MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (size <= 0) {  // this end goes in the way it came
    pair.over = true;
    if (size < 0) {
      reset(pair.client);
      reset(pair.server);
    }
    return;
  }
  if (from_server && lose_) {
    lose_ = false;
    reset(pair.client);
    reset(pair.server);
    pair.over = true;
    ++cuts_;
    return;
  }
  for (ssize_t sent = 0; sent < size && !pair.over;) {
    const ssize_t n = ::send(to.get(), buffer + sent, static_cast<size_t>(size - sent), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      sent += n;
    } else if (errno == EAGAIN) {
      pollfd room{to.get(), POLLOUT, 0};
      ::poll(&room, 1, 1000);
    } else {
      pair.over = true;
    }
  }
}

void Middleman::work() {
  for (;;) {
    std::vector<pollfd> polled{{listening_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
      if (state_ != State::kStill)
        for (const auto& pair : pairs_)
          for (const int fd : {pair.client.get(), pair.server.get()}) polled.push_back({fd, POLLIN, 0});
      if (state_ == State::kStill) polled[0].events = 0;  // who connects gets no answer
    }
    if (::poll(polled.data(), polled.size(), -1) <= 0) continue;
    uint64_t count = 0;
    [[maybe_unused]] const auto bytes = ::read(wake_.get(), &count, sizeof count);
    const std::lock_guard lock(mutex_);
    if (state_ != State::kStill) {
      // Those that were cut meanwhile have taken their descriptors along; to look at one more does no harm.
      for (auto& pair : pairs_) {
        forward(pair, false);
        if (!pair.over) forward(pair, true);
      }
      pairs_.remove_if([](const Pair& pair) { return pair.over; });
    }
    if (polled[0].revents) accept_one();
  }
}

}  // namespace muster::test
