#include "store/address/tcp_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/fork_count.h"
#include "base/text.h"
#include "base/thread.h"
#include "muster/base/error.h"
#include "store/kit/await_ready.h"
#include "store/kit/quote.h"

namespace muster::store {
namespace {

constexpr std::chrono::seconds kLookUp{10};  // for the address that a server is to have

Resolved look_up(const TcpAddress& address, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (error != 0)
    return {{}, error == EAI_SYSTEM ? std::generic_category().message(errno) : std::string(::gai_strerror(error))};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, ::freeaddrinfo);
  Resolved resolved;
  for (const addrinfo* one = found; one; one = one->ai_next)
    resolved.addresses.emplace_back(one->ai_addr, one->ai_addrlen);
  return resolved;
}

UniqueFd make_socket(int family) {
  return UniqueFd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
}

void set(int socket, int level, int name, int value) { ::setsockopt(socket, level, name, &value, sizeof value); }

}  // namespace

SocketAddress::SocketAddress(const sockaddr* address, socklen_t size) : size_(size) {
  std::memcpy(&storage_, address, std::min<size_t>(size, sizeof storage_));
}

SocketAddress SocketAddress::of(int socket) {
  SocketAddress address;
  address.size_ = sizeof address.storage_;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address.storage_), &address.size_) != 0)
    throw_errno("getsockname of the store's socket");
  return address;
}

SocketAddress SocketAddress::of_peer(int socket) {
  SocketAddress address;
  address.size_ = sizeof address.storage_;
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&address.storage_), &address.size_) != 0) return {};
  return address;
}

uint16_t SocketAddress::port() const {
  if (family() == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&storage_)->sin_port);
  if (family() == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_port);
  return 0;
}

std::string SocketAddress::host() const {
  static constexpr std::string_view kMapped = "::ffff:";  // how IPv6 writes the addresses of IPv4
  std::array<char, NI_MAXHOST> name{};
  if (::getnameinfo(get(), size_, name.data(), name.size(), nullptr, 0, NI_NUMERICHOST) != 0) return "an unknown host";
  const std::string_view written(name.data());
  return std::string(written.starts_with(kMapped) ? written.substr(kMapped.size()) : written);
}

bool operator==(const SocketAddress& one, const SocketAddress& other) {
  return one.family() == other.family() && one.port() == other.port() && one.host() == other.host();
}

TcpAddress TcpAddress::parse(std::string_view address, std::string_view whole) {
  const auto refuse = [&](std::string_view why) {
    throw InvalidArgument(muster::text(quote(whole), " is not the address of a store: ", why),
                          "Write it like tls://host:29400, tls://10.1.2.3:29400 or tls://[fe80::1]:29400");
  };
  const size_t colon = address.rfind(':');
  if (colon == std::string_view::npos) refuse("it has no port");
  std::string_view host = address.substr(0, colon);
  const std::string_view digits = address.substr(colon + 1);
  TcpAddress parsed;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), parsed.port);
  if (error != std::errc() || end != digits.data() + digits.size()) refuse("its port is not a number from 0 to 65535");
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    refuse("an IPv6 address needs brackets");
  }
  if (host.empty() || host.size() >= NI_MAXHOST || host.find_first_of("/[]@ \t\n") != std::string_view::npos ||
      host.find('\0') != std::string_view::npos)
    refuse("it has no host");
  parsed.host = host;
  return parsed;
}

std::string TcpAddress::text() const {
  return host.find(':') == std::string::npos ? muster::text(host, ':', port) : muster::text('[', host, "]:", port);
}

namespace {

// A question to the name servers. It goes on when who asked gives up, and who asks again meanwhile gets its answer:
// somebody who asks with short deadlines would otherwise never get that of a slow server.
struct Search {
  std::mutex mutex;
  std::condition_variable over;
  std::optional<Resolved> found;
};

std::shared_ptr<Search> search_for(const TcpAddress& address) {
  struct Table {
    const int forks = fork_count();
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<Search>> under_way;
  };
  static std::atomic<Table*> of_process{new Table};
  Table* table = of_process.load();
  if (table->forks != fork_count()) {  // the threads that search are the parent's, and one may have held the mutex
    auto* const mine = new Table;
    table = of_process.compare_exchange_strong(table, mine) ? mine : of_process.load();
  }
  const std::lock_guard lock(table->mutex);
  auto& search = table->under_way[address.text()];
  if (search) return search;
  const auto mine = search = std::make_shared<Search>();
  const auto run = [mine, address, table] {
    Resolved found = look_up(address, AI_ADDRCONFIG);
    {
      const std::lock_guard lock(table->mutex);
      table->under_way.erase(address.text());
    }
    const std::lock_guard lock(mine->mutex);
    mine->found = std::move(found);
    mine->over.notify_all();
  };
  try {
    start_thread("muster-resolve", run).detach();
  } catch (...) {
    table->under_way.erase(address.text());
    throw;
  }
  return mine;
}

}  // namespace

Resolved resolve(const TcpAddress& address, Deadline deadline) {
  if (auto number = look_up(address, AI_NUMERICHOST); !number.addresses.empty()) return number;
  const auto search = search_for(address);
  std::unique_lock lock(search->mutex);
  if (!deadline.wait(search->over, lock, [&] { return search->found.has_value(); }))
    throw TimeoutError(text("the address of host ", quote(address.host), " was not found in time"), {},
                       "Look whether its name server answers");
  return *search->found;
}

UniqueFd listen_tcp(const TcpAddress& address) {
  const auto found = resolve(address, Deadline::after(kLookUp));
  std::string reason = found.reason;
  bool taken = false;
  for (const auto& one : found.addresses) {
    UniqueFd socket = make_socket(one.family());
    // The kernel keeps connections of an earlier server at this address for a minute; they do not matter.
    if (socket) set(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (one.family() == AF_INET6 && socket) set(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);  // "::" is IPv4 too
    if (socket && ::bind(socket.get(), one.get(), one.size()) == 0 && ::listen(socket.get(), SOMAXCONN) == 0)
      return socket;
    taken = taken || errno == EADDRINUSE;
    reason = std::generic_category().message(errno);
  }
  throw Unavailable(text("cannot serve a store at ", kTlsScheme, address.text(), ": ", reason),
                    taken ? "Another server has that port; choose another, or 0 for a free one"
                          : "Name an address of this host, or [::] for all of them");
}

UniqueFd dial_tcp(const SocketAddress& address, Deadline deadline, int* error) {
  UniqueFd socket = make_socket(address.family());
  *error = errno;
  if (!socket) return {};
  set_tcp_options(socket.get());
  if (::connect(socket.get(), address.get(), address.size()) != 0) {
    *error = errno;
    if (*error != EINPROGRESS && *error != EINTR) return {};
    *error = ETIMEDOUT;
    if (!await_ready(socket.get(), POLLOUT, deadline)) return {};
    socklen_t size = sizeof *error;
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, error, &size) != 0) *error = errno;
    if (*error != 0) return {};
  }
  // If nobody listens at a port that the kernel also gives to clients, a socket may connect to itself.
  *error = ECONNREFUSED;
  if (SocketAddress::of(socket.get()) == SocketAddress::of_peer(socket.get())) return {};
  *error = 0;
  return socket;
}

void set_tcp_options(int socket) {
  constexpr int kDead = static_cast<int>(kDeadHost.count()), kProbes = 3, kBetween = 2;
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, kDead * 1000);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, kDead - kProbes * kBetween);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, kBetween);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
}

}  // namespace muster::store
