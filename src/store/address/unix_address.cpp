#include "store/address/unix_address.h"

#include <cstddef>
#include <cstring>

#include "base/text.h"
#include "muster/base/error.h"
#include "store/kit/quote.h"

namespace muster::store {

UnixAddress::UnixAddress(std::string_view name) : name_(name) {
  const bool abstract = name.starts_with('@');
  if (!abstract && !name.starts_with('/'))
    throw InvalidArgument(muster::text(quote(name), " does not name a Unix-domain socket"),
                          "Use '@name' for an abstract socket or '/path' for one in the file system");
  // A path needs room for a zero byte at its end; an abstract name has a zero byte at its start, in place of the '@'.
  if (name.size() + (abstract ? 0 : 1) > sizeof address_.sun_path || name.size() < 2 ||
      name.find('\0') != std::string_view::npos)
    throw InvalidArgument(muster::text("the socket name ", quote(name), " is empty, has a zero byte or is longer than ",
                                       sizeof address_.sun_path - 1, " bytes"),
                          "Choose another name");
  address_.sun_family = AF_UNIX;
  std::memcpy(address_.sun_path, name.data(), name.size());
  if (abstract) address_.sun_path[0] = '\0';
  size_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size() + (abstract ? 0 : 1));
}

UnixAddress UnixAddress::parse(std::string_view address) {
  if (!address.starts_with(kUnixScheme))
    throw InvalidArgument(muster::text(quote(address), " is not the address of a store"),
                          "Pass what StoreServer::address() returned: 'unix:@muster-…' or 'tls://host:port'");
  return UnixAddress(address.substr(kUnixScheme.size()));
}

ucred peer_of(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) throw_errno("getsockopt(SO_PEERCRED)");
  return peer;
}

}  // namespace muster::store
