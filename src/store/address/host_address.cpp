#include "store/address/host_address.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

#include "base/fd.h"
#include "store/address/tcp_address.h"

namespace muster::store {

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "localhost";
}

namespace {

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

std::string address_towards(const std::string& host, const std::string& port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> targets(found, ::freeaddrinfo);
  for (const addrinfo* target = found; target; target = target->ai_next) {
    if (is_loopback(SocketAddress(target->ai_addr, target->ai_addrlen).host()) && host != "localhost" &&
        !is_loopback(host))
      continue;
    // Connecting a datagram socket only chooses the route.
    const UniqueFd socket(::socket(target->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (socket && ::connect(socket.get(), target->ai_addr, target->ai_addrlen) == 0)
      return SocketAddress::of(socket.get()).host();
  }
  return {};
}

std::string address_towards_store(const std::string& store_address) {
  if (store_address.starts_with("unix:")) return "127.0.0.1";
  std::string host, port;
  return split(store_address, &host, &port) ? address_towards(host, port) : std::string();
}

std::string own_address(const std::string& store_address) {
  const std::string address = address_towards_store(store_address);
  return address.empty() ? host_name() : address;
}

bool is_own(const std::string& store_address) {
  std::string host, port;
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (!split(store_address, &host, &port) || ::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> targets(found, ::freeaddrinfo);
  for (const addrinfo* target = found; target; target = target->ai_next) {
    // A socket can be bound only to an address of this host. Port 0 lets the kernel choose a free port.
    const UniqueFd socket(::socket(target->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (socket && ::bind(socket.get(), target->ai_addr, target->ai_addrlen) == 0) return true;
  }
  return false;
}

std::vector<std::string> own_addresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {"127.0.0.1"};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> held(list, ::freeifaddrs);
  std::vector<std::pair<int, std::string>> found;
  for (const ifaddrs* one = list; one; one = one->ifa_next) {
    if (!one->ifa_addr || !(one->ifa_flags & IFF_UP)) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const SocketAddress address(one->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    const std::string host = address.host();
    if (host.starts_with("fe80:")) continue;  // means another host on each link
    // A bridge of containers has the same address on many hosts: a peer that tries it may reach itself.
    const std::string_view name(one->ifa_name);
    const bool is_bridge = name.starts_with("docker") || name.starts_with("br-") || name.starts_with("virbr");
    const int order = one->ifa_flags & IFF_LOOPBACK ? 4 : (is_bridge ? 2 : 0) + (family == AF_INET6 ? 1 : 0);
    if (order == 4 && family == AF_INET6) continue;
    found.emplace_back(order, host);
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  if (found.empty()) return {"127.0.0.1"};
  if (found.front().first < 4) std::erase_if(found, [](const auto& one) { return one.first == 4; });
  std::vector<std::string> hosts;
  for (auto& [order, host] : found) hosts.push_back(std::move(host));
  return hosts;
}

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

std::string address_for_peers(const std::vector<std::string>& towards, const std::vector<std::string>& own,
                              bool may_be_far) {
  for (const auto& address : towards)
    if (!address.empty() && !(may_be_far && is_loopback(address))) return address;
  return may_be_far && !own.empty() ? own.front() : "127.0.0.1";
}

}  // namespace muster::store
