// Addresses of TCP sockets as users write them, "host:port", and as the kernel takes them.
//
// Sockets made here are close-on-exec and non-blocking, send small messages at once (TCP_NODELAY), and notice within
// kDeadHost that the other host is gone: by probes of an idle connection (SO_KEEPALIVE) and by a limit on
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
  static SocketAddress of_peer(int socket);  // the other end; family() is AF_UNSPEC where there is none

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const { return size_; }
  int family() const { return storage_.ss_family; }
  uint16_t port() const;
  std::string host() const;  // "10.1.2.3" or "fe80::1"; an IPv4 address also where the socket is IPv6's
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
  std::string text() const;  // "host:port", with brackets where there must be some
};

struct Resolved {
  std::vector<SocketAddress> addresses;  // in the resolver's order; empty where there is none
  std::string reason;                    // then: why
};

// The addresses of a host, by getaddrinfo(3). That knows no deadline, so names are looked up in a thread, which is left
// behind where it takes longer. Timeout.
Resolved resolve(const TcpAddress& address, Deadline deadline);

// A listening socket at the first of the host's addresses where there can be one. Unavailable.
UniqueFd listen_tcp(const TcpAddress& address);

// A connected socket, or none and the errno.
UniqueFd dial_tcp(const SocketAddress& address, Deadline deadline, int* error);

// What is said above, for a socket that was accepted. Best effort.
void set_tcp_options(int socket);

}  // namespace muster::store
