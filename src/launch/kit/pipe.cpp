#include "launch/kit/pipe.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>

#include "muster/base/error.h"

namespace muster::launch {
namespace {

constexpr const char* kMoreDescriptors = "Use fewer ranks, or raise the limit of open files (ulimit -n)";

}  // namespace

UniqueFd above_standard(UniqueFd fd) {
  if (fd.get() > STDERR_FILENO) return fd;
  UniqueFd moved(::fcntl(fd.get(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  if (!moved) throw_errno("cannot make a descriptor", kMoreDescriptors);
  return moved;
}

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_errno("cannot make a pipe to a rank", kMoreDescriptors);
  UniqueFd read(ends[0]), write(ends[1]);
  return {above_standard(std::move(read)), above_standard(std::move(write))};
}

SocketPair make_socket_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    throw_errno("cannot make a pair of sockets", kMoreDescriptors);
  UniqueFd one(ends[0]), other(ends[1]);
  return {above_standard(std::move(one)), above_standard(std::move(other))};
}

UniqueFd open_null(int flags) {
  UniqueFd fd(::open("/dev/null", flags | O_CLOEXEC));
  if (!fd) throw_errno("cannot open /dev/null");
  return above_standard(std::move(fd));
}

void set_nonblocking(const UniqueFd& fd) {
  if (::fcntl(fd.get(), F_SETFL, O_NONBLOCK) != 0) throw_errno("fcntl(F_SETFL)");
}

}  // namespace muster::launch
