// Addresses of Unix-domain sockets: "@name" (abstract: no file, gone with its last socket) or "/path" as sockaddr_un.
//
// Thread-safety: a value.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <string>
#include <string_view>

namespace muster::store {

inline constexpr std::string_view kUnixScheme = "unix:";

class UnixAddress {
 public:
  // InvalidArgument unless "@name" or "/path", and short enough for a socket.
  explicit UnixAddress(std::string_view name);
  // The same from "unix:@name" or "unix:/path".
  static UnixAddress parse(std::string_view address);

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address_); }
  socklen_t size() const { return size_; }
  bool is_path() const { return address_.sun_path[0] != '\0'; }
  const std::string& name() const { return name_; }
  std::string text() const { return std::string(kUnixScheme) + name_; }

 private:
  std::string name_;
  sockaddr_un address_{};
  socklen_t size_ = 0;
};

// The process and user that made the other end of a connected Unix-domain socket (SO_PEERCRED, unix(7)). Unavailable if
// the kernel does not say.
ucred peer_of(int socket);

}  // namespace muster::store
