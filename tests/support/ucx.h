// Whether UCX can be used, asked in a child process: who has loaded UCX must not fork while other threads map memory,
// for a lock of its memory events may then stay locked in the child.
//
// Thread-safety: called while the process has no other threads.
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "base/fd.h"
#include "muster/base/error.h"
#include "transport/ucx/fabric_library.h"

namespace muster::test {

// "" where it can; else why not.
inline std::string why_no_ucx() {
  static const std::string answer = [] {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe2");
    const UniqueFd in(ends[0]);
    UniqueFd out(ends[1]);
    const pid_t child = ::fork();
    if (child < 0) throw_errno("fork");
    if (child == 0) {
      const std::string why = transport::ucx::unavailable_reason();
      ::_exit(::write(out.get(), why.data(), why.size()) == static_cast<ssize_t>(why.size()) ? 0 : 1);
    }
    out.reset();
    std::string why;
    char bytes[4096];
    for (ssize_t n = 0; (n = ::read(in.get(), bytes, sizeof bytes)) > 0;) why.append(bytes, static_cast<size_t>(n));
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? why : "the process that asked has ended";
  }();
  return answer;
}

}  // namespace muster::test
