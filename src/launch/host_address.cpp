#include "launch/host_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>

#include "base/fd.h"

namespace muster::launch {
namespace {

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "localhost";
}

// "scheme://host:port,…/…" -> host and port.
bool split(const std::string& address, std::string* host, std::string* port) {
  const auto scheme = address.find("://");
  if (scheme == std::string::npos) return false;
  const std::string rest = address.substr(scheme + 3, address.find_first_of(",/", scheme + 3) - scheme - 3);
  const auto colon = rest.rfind(':');
  if (colon == std::string::npos) return false;
  *host = rest.substr(0, colon);
  *port = rest.substr(colon + 1);
  if (host->size() > 1 && host->front() == '[' && host->back() == ']') *host = host->substr(1, host->size() - 2);
  return true;
}

}  // namespace

std::string own_address(const std::string& store_address) {
  if (store_address.starts_with("unix:")) return "127.0.0.1";
  std::string host, port;
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (!split(store_address, &host, &port) || ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0)
    return host_name();
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> targets(found, ::freeaddrinfo);
  for (const addrinfo* target = found; target; target = target->ai_next) {
    // Connecting a datagram socket only chooses the route.
    const UniqueFd socket(::socket(target->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    char text[NI_MAXHOST];
    const bool loops = target->ai_family == AF_INET &&
                       (ntohl(reinterpret_cast<const sockaddr_in*>(target->ai_addr)->sin_addr.s_addr) >> 24) == 127;
    if (loops && host != "localhost" && !host.starts_with("127.")) continue;  // the name may reach it from elsewhere
    if (socket && ::connect(socket.get(), target->ai_addr, target->ai_addrlen) == 0 &&
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
        ::getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0)
      return text;
  }
  return host_name();
}

bool is_own(const std::string& store_address) {
  std::string host, port;
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (!split(store_address, &host, &port) || ::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> targets(found, ::freeaddrinfo);
  for (const addrinfo* target = found; target; target = target->ai_next) {
    // Only an address of this host can be bound; with port 0, any time.
    const UniqueFd socket(::socket(target->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (socket && ::bind(socket.get(), target->ai_addr, target->ai_addrlen) == 0) return true;
  }
  return false;
}

}  // namespace muster::launch
