// Addresses of TCP sockets as users write them, "host:port", and as the kernel takes them.
//
// Sockets made here are close-on-exec and non-blocking, send small messages immediately (TCP_NODELAY), and notice
// within kDeadHost that the other host has gone: by probes of an idle connection (SO_KEEPALIVE) and by a limit on
// unacknowledged bytes (TCP_USER_TIMEOUT); see tcp(7).
//
// Thread-safety: values and functions.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "muster/base/deadline.h"

namespace muster::store {

inline constexpr std::string_view kTlsScheme = "tls://";
inline constexpr std::chrono::seconds kDeadHost{10};

// Where a TCP socket is, for the kernel.
class SocketAddress {
 public:
  SocketAddress() = default;
  SocketAddress(const sockaddr* address, socklen_t size);
  static SocketAddress of(int socket);       // its own end
  static SocketAddress of_peer(int socket);  // the other end; family() is AF_UNSPEC if there is none

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const { return size_; }
  int family() const { return storage_.ss_family; }
  uint16_t port() const;
  std::string host() const;  // "10.1.2.3" or "fe80::1"; an IPv4 address also for an IPv6 socket that holds one
  friend bool operator==(const SocketAddress& one, const SocketAddress& other);

 private:
  sockaddr_storage storage_{};
  socklen_t size_ = 0;
};

struct TcpAddress {
  std::string host;  // a name or a number, without brackets
  uint16_t port = 0;

  // From "host:port", "1.2.3.4:port" or "[::1]:port". InvalidArgument; `whole`: what to name in its message.
  static TcpAddress parse(std::string_view address, std::string_view whole);
  std::string text() const;  // "host:port", with brackets around an IPv6 address
};

struct Resolved {
  std::vector<SocketAddress> addresses;  // in the resolver's order; empty if there is none
  std::string reason;                    // then: why
};

// The addresses of a host, from getaddrinfo(3). That function has no deadline, so a separate thread looks up names; if
// it takes longer, it is left running. TimeoutError.
Resolved resolve(const TcpAddress& address, Deadline deadline);

// A listening socket at the first of the host's addresses that allows it. Unavailable.
UniqueFd listen_tcp(const TcpAddress& address);

// A connected socket, or none and the errno.
UniqueFd dial_tcp(const SocketAddress& address, Deadline deadline, int* error);

// Sets the options that are named at the top on an accepted socket, as far as possible.
void set_tcp_options(int socket);

}  // namespace muster::store
