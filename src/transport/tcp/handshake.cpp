#include "transport/tcp/handshake.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "store/address/tcp_address.h"

namespace muster::transport {

Handshake::Handshake(std::unique_ptr<SocketStream> stream, const Hello& mine, const HelloKey& own)
    : stream_(std::move(stream)), state_(State::kConnecting), dials_(true), own_(own), out_(mine.bytes()) {}

Handshake::Handshake(std::unique_ptr<SocketStream> stream, Judge judge)
    : stream_(std::move(stream)), state_(State::kTls), dials_(false), judge_(std::move(judge)) {}

uint32_t Handshake::events() const {
  if (state_ == State::kConnecting) return EPOLLOUT;
  const bool has_more = stream_->unsent() > 0 || (state_ == State::kTalking && written_ < out_.size());
  return has_more ? EPOLLIN | EPOLLOUT : EPOLLIN;
}

bool Handshake::is_connected() {
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) throw Unavailable(std::generic_category().message(error));
  const auto peer = store::SocketAddress::of_peer(fd());
  if (peer.family() == AF_UNSPEC) return false;
  // If nobody listens at a port from the range that the kernel gives to clients, a socket may connect to itself.
  if (peer == store::SocketAddress::of(fd())) throw Unavailable("nobody listens there");
  return true;
}

bool Handshake::write_out() {
  while (written_ < out_.size()) {
    const iovec rest{out_.data() + written_, out_.size() - written_};
    const ssize_t n = stream_->write({&rest, 1}, rest.iov_len);
    if (n == SocketStream::kGone) throw Unavailable("its connection was closed");
    if (n == 0) return false;
    written_ += static_cast<size_t>(n);
  }
  if (!stream_->flush()) throw Unavailable("its connection was closed");
  return stream_->unsent() == 0;
}

// Reads exactly one greeting: the bytes that follow are for the connection's next reader.
bool Handshake::read_greeting() {
  std::array<std::byte, kHelloBytes> buffer;
  while (in_.size() < kHelloBytes) {
    const ssize_t n = stream_->read({}, std::span(buffer).first(kHelloBytes - in_.size()), true);
    if (n == SocketStream::kGone) throw Unavailable(text("its connection ", stream_->why()));
    if (n == 0) return false;
    in_.append(reinterpret_cast<const char*>(buffer.data()), static_cast<size_t>(n));
  }
  stream_->keep();
  other_ = Hello::parse(in_);
  return true;
}

void Handshake::check_answer() const {
  if (!same_key(other_.key, own_)) throw Unauthorized("it answered for another job");
  switch (other_.answer) {
    case HelloAnswer::kWelcome:
      return;
    case HelloAnswer::kOtherVersion:
      throw Mismatch(text("it speaks version ", other_.version, " of the protocol, and this worker ", kProtocolVersion),
                     "Run the same version of Muster in all workers");
    case HelloAnswer::kOtherSize:
      throw Mismatch(text("its job has ", other_.size, " workers, and this worker's job another number"));
    case HelloAnswer::kNotExpected:
      break;
  }
  throw Mismatch("it does not expect this worker");
}

bool Handshake::step() {
  if (state_ == State::kConnecting) {
    if (!is_connected()) return false;
    state_ = State::kTls;
  }
  if (state_ == State::kTls) {
    if (!stream_->shake_hands()) return false;
    state_ = State::kTalking;
  }
  if (dials_) {
    if (!write_out() || !read_greeting()) return false;
    check_answer();
    return true;
  }
  if (!heard_) {
    if (!read_greeting()) return false;
    heard_ = true;
    out_ = judge_(other_).bytes();
  }
  if (!write_out()) return false;
  const auto answer = Hello::parse(out_).answer;
  if (answer != HelloAnswer::kWelcome)
    throw Mismatch(text("worker ", other_.rank, " of ", other_.size, ", protocol ", other_.version,
                        ", is not one that this worker expects"));
  return true;
}

}  // namespace muster::transport
