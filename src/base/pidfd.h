// Process descriptors (pidfd_open(2)): they identify a process for ever, and become readable when it ends.
//
// glibc 2.36 declares its wrappers without extern "C", so these are the system calls.
//
// Thread-safety: all functions.
#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>

#include "base/fd.h"
#include "muster/base/deadline.h"

namespace muster {

// Always close-on-exec. Empty, with errno set, if there is no such process or no free descriptor.
inline UniqueFd open_pidfd(pid_t pid) { return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))); }

inline void signal_pidfd(const UniqueFd& pidfd, int signal) {
  ::syscall(SYS_pidfd_send_signal, pidfd.get(), signal, nullptr, 0);
}

// Whether the process ended before the deadline. Without a pidfd: no.
inline bool await_end(const UniqueFd& pidfd, Deadline deadline) {
  pollfd end{pidfd.get(), POLLIN, 0};  // poll(2) ignores -1
  int ready = 0;
  do ready = ::poll(&end, 1, deadline.poll_ms());
  while (ready < 0 && errno == EINTR);
  return ready > 0;
}

}  // namespace muster
