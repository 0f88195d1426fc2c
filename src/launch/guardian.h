// The guardian: a tiny process beside the launcher that ends the job when the launcher cannot, because it was killed.
//
// PR_SET_PDEATHSIG ends the ranks with their launcher, but not what the ranks started. So before the first rank the
// launcher forks a guardian with a session of its own, no standard descriptors, and every signal blocked, and waits
// until it is all that. Then the guardian reads a socket:
//
//   a process id   A rank wrote its own, before it does anything else, so no rank is unknown to the guardian.
//                  From now on the process group of that rank is the guardian's to kill.
//   -2             All ranks so far have ended, and will be reaped: they are forgotten. The job goes on with others.
//   -<process id>  That rank has, and another takes its place.
//   0              The launcher's goodbye: all ranks have ended, and it will reap the first now. The guardian exits.
//   end of file    The launcher was killed: SIGKILL to every group, and to every process that has this job's id in its
//                  environment, until there is none. Then the guardian exits.
//
// No stranger can have got one of those process ids: the launcher reaps no rank before its goodbye, so ids stay taken.
//
// Thread-safety: none; start() in a process with one thread.
#pragma once

#include <sys/types.h>

#include <string>

#include "base/fd.h"

namespace muster::launch {

class Guardian {
 public:
  // Unavailable where there are too few processes or descriptors.
  static Guardian start(const std::string& job_id);

  Guardian() = default;
  Guardian(Guardian&& other) noexcept : pid_(std::exchange(other.pid_, 0)), socket_(std::move(other.socket_)) {}
  Guardian& operator=(Guardian&&) = delete;
  ~Guardian() { say_goodbye(); }

  pid_t pid() const { return pid_; }            // 0: there is none
  int socket() const { return socket_.get(); }  // for announce(); -1 where there is none

  // In a rank, between fork and exec. Async-signal-safe.
  static void announce(int socket);

  // All ranks so far have ended and may be reaped when this returns.
  void forget();
  void forget(pid_t rank);  // this one

  // Ends it and waits until it is gone. Nothing where there is none.
  void say_goodbye();

 private:
  pid_t pid_ = 0;
  UniqueFd socket_;
};

}  // namespace muster::launch
