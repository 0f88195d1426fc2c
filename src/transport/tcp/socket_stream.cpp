#include "transport/tcp/socket_stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <system_error>
#include <utility>

namespace muster::transport {

ssize_t SocketStream::send(std::span<const iovec> parts) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = std::min<size_t>(parts.size(), IOV_MAX);
  for (;;) {
    const ssize_t n = ::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) return n;
    if (errno == EAGAIN || errno == ENOBUFS) return 0;
    if (errno != EINTR) return kGone;
  }
}

ssize_t SocketStream::receive(std::span<const iovec> parts) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  for (;;) {
    const ssize_t n = ::recvmsg(fd(), &message, MSG_DONTWAIT);
    if (n > 0) return n;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == ENOMEM)) return 0;
    why_ = n == 0                ? "was closed"
           : errno == ECONNRESET ? "was reset"
                                 : "broke: " + std::generic_category().message(errno);
    return kGone;
  }
}

ssize_t SocketStream::write(std::span<const iovec> parts, size_t) { return send(parts); }

ssize_t SocketStream::read(std::span<std::byte> first, std::span<std::byte> second, bool fetch) {
  if (!fetch) return 0;
  const iovec parts[] = {{first.data(), first.size()}, {second.data(), second.size()}};
  return receive(parts);
}

void SocketStream::no_more() { ::shutdown(fd(), SHUT_WR); }

void SocketStream::end() {
  if (!socket_) return;
  ::shutdown(fd(), SHUT_RDWR);
  socket_.reset();
}

std::unique_ptr<SocketStream> make_plain_stream(UniqueFd socket) {
  return std::make_unique<SocketStream>(std::move(socket));
}

}  // namespace muster::transport
