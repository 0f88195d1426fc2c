#include "launch/output/sink.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/text.h"

namespace muster::launch {

Sink::Sink(int fd) : fd_(fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) {
    discard_ = true;
    return;
  }
  terminal_ = ::isatty(fd);
  socket_ = S_ISSOCK(status.st_mode);
  if (S_ISFIFO(status.st_mode) || terminal_) {
    own_.reset(::open(text("/proc/self/fd/", fd).c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
    blocking_ = !own_;
  } else if (S_ISCHR(status.st_mode)) {
    blocking_ = true;
  }
}

int Sink::columns() const {
  winsize size{};
  return ::ioctl(fd_, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool Sink::same_stream(int a, int b) {
  struct stat one {
  }, other{};
  return ::fstat(a, &one) == 0 && ::fstat(b, &other) == 0 && one.st_dev == other.st_dev && one.st_ino == other.st_ino &&
         one.st_rdev == other.st_rdev && !S_ISREG(one.st_mode);
}

long Sink::write_some(std::string_view bytes) {
  if (socket_) return ::send(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (!blocking_) return ::write(poll_fd(), bytes.data(), bytes.size());
  pollfd ready{fd_, POLLOUT, 0};
  if (::poll(&ready, 1, 0) == 0) {
    errno = EAGAIN;
    return -1;
  }
  return ::write(fd_, bytes.data(), std::min<size_t>(bytes.size(), PIPE_BUF));
}

void Sink::flush() {
  while (!empty() && error_ == 0) {
    const long written = write_some(std::string_view(pending_).substr(done_));
    if (written >= 0) {
      done_ += static_cast<size_t>(written);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno != EINTR) {
      error_ = errno;
    }
  }
  if (error_ != 0 || empty()) {
    pending_.clear();
    done_ = 0;
  } else if (done_ > kFull) {
    pending_.erase(0, done_);
    done_ = 0;
  }
}

}  // namespace muster::launch
