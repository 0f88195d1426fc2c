// Thread-safety: all functions.
#pragma once

#include <poll.h>

#include <cerrno>

#include "muster/base/deadline.h"
#include "muster/base/error.h"

namespace muster::store {

// Whether `fd` is ready for `events` before the deadline.
inline bool await_ready(int fd, short events, Deadline deadline) {
  pollfd one{fd, events, 0};
  for (;;) {
    const int ready = ::poll(&one, 1, deadline.is_never() ? -1 : deadline.poll_ms());
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR && errno != EAGAIN) throw_errno("poll of the store's connection");
    if (ready <= 0 && deadline.passed()) return false;
  }
}

}  // namespace muster::store
