// The guardian: a small process beside the launcher that ends the job when the launcher cannot, because it was killed.
//
// PR_SET_PDEATHSIG ends the ranks with their launcher, but not the processes that the ranks started. So before the
// first rank, the launcher forks a guardian with its own session, no standard descriptors, and every signal blocked,
// and waits until it is ready. Then the guardian reads a socket:
//
//   a process id   A rank wrote its own id, before it does anything else, so the guardian knows every rank. From now on
//                  the guardian may kill the process group of that rank.
//   -2             All ranks so far have ended and will be reaped: the guardian forgets them. The job goes on with
//                  other ranks.
//   -<process id>  The same for one rank; another rank takes its place.
//   0              The launcher's goodbye: all ranks have ended, and the launcher will now reap the first. The guardian
//                  exits.
//   end of file    The launcher was killed. The guardian sends SIGKILL to every group, and to every process that has
//                  this job's id in its environment, until there is none. Then it exits.
//
// No other process can have got one of those process ids: the launcher reaps no rank before its goodbye, so the ids
// stay in use.
//
// Thread-safety: none; start() in a process with one thread.
#pragma once

#include <sys/types.h>

#include <string>

#include "base/fd.h"

namespace muster::launch {

class Guardian {
 public:
  // Unavailable if there are too few processes or descriptors.
  static Guardian start(const std::string& job_id);

  Guardian() = default;
  Guardian(Guardian&& other) noexcept : pid_(std::exchange(other.pid_, 0)), socket_(std::move(other.socket_)) {}
  Guardian& operator=(Guardian&&) = delete;
  ~Guardian() { say_goodbye(); }

  pid_t pid() const { return pid_; }            // 0: none was started
  int socket() const { return socket_.get(); }  // for announce(); -1 if none was started

  // In a rank, between fork and exec. Async-signal-safe.
  static void announce(int socket);

  // All ranks so far have ended and may be reaped when this returns.
  void forget();
  void forget(pid_t rank);  // this one

  // Ends the guardian and waits until it is gone. Does nothing if none was started.
  void say_goodbye();

 private:
  pid_t pid_ = 0;
  UniqueFd socket_;
};

}  // namespace muster::launch
