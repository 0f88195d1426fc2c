// Calls that the kernel refuses from now on: how a test makes them fail.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

#include <span>

namespace muster::test {

// For the calling thread and what it starts, for good; false where that is forbidden.
inline bool filter_calls(std::span<sock_filter> code) {
  const sock_fprog program{static_cast<unsigned short>(code.size()), code.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

}  // namespace muster::test
