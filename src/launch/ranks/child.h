// One rank's process: fork, its own process group and its own descriptors, then the program or the function.
//
// Between fork(2) and execve(2) only async-signal-safe calls are made; everything else is prepared before.
//
// Thread-safety: all functions.
#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <functional>
#include <optional>
#include <vector>

namespace muster::launch {

struct ChildPlan {
  int rank = 0;
  char** environment = nullptr;

  // The program, or the function.
  const char* path = nullptr;
  char** arguments = nullptr;
  const std::function<int()>* body = nullptr;

  // The descriptors that become 0, 1 and 2; -1: stays as it is.
  int standard[3] = {-1, -1, -1};
  const std::vector<unsigned long>* affinity = nullptr;  // a mask for sched_setaffinity(2); null: as it is
  std::vector<int> to_close;  // in a rank that runs a function; execve(2) closes them otherwise
  int black_box = -1;         // stays open in the program
  int error_pipe = -1;        // gets an ExecError if execve(2) fails
  int guardian_socket = -1;

  sigset_t mask;                     // the rank's
  bool default_signals = false;      // every disposition back to its default, except an ignored SIGHUP (nohup)
  std::optional<rlimit> open_files;  // the rank's limit, if the launcher raised its own
};

// What a rank that could not start its program writes before it ends with kNotStarted. Written whole.
struct ExecError {
  int rank, error;
};
inline constexpr int kNotStarted = 127;

// Returns the process id of the rank, which leads its process group. Unavailable if there are too many processes.
pid_t fork_rank(const ChildPlan& plan);

}  // namespace muster::launch
