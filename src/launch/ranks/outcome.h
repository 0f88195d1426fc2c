// Which of the failed ranks is the cause, and how to report it.
//
// Thread-safety: values.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "launch/output/last_lines.h"
#include "muster/base/deadline.h"
#include "muster/launch/launcher.h"

namespace muster::launch {

struct Failure {
  int rank = 0;
  pid_t pid = 0;
  int exit_status = 0;  // if signal is 0
  int signal = 0;
  bool dumped_core = false;
  bool unknown = false;  // other code in this process reaped it, so its exit status is unknown
  Clock::time_point when;
  const LastLines* last_lines = nullptr;  // of its standard error
  std::string killer;                     // who sent SIGKILL, in words; empty: unknown
  std::string error;                      // what it wrote to its error file; empty: nothing

  // Whether the rank only reports that another rank, or the job's store, went away: its exception is muster::PeerLost,
  // muster::Aborted, or muster::Unavailable about the store.
  bool is_consequence() const;
};

// The cause among `failures` (at least one), which are in the order in which the launcher learned of them. It is the
// first, unless a better one came within `settle` (LaunchOptions): deaths by a signal before exits, consequences last.
// `echo`: how long before its cause a consequence may arrive; longer over several hosts.
const Failure& choose_cause(const std::vector<Failure>& failures, std::chrono::nanoseconds settle,
                            std::chrono::nanoseconds echo);

// `operations`: the rank's last ones, in words.
Outcome describe(const Failure& cause, std::vector<std::string> operations = {});
Outcome describe_stop(int signal);  // the user ended the job

// "exited with status 3", "killed by SIGKILL (9)"
std::string end_of(const Failure& failure);

// "SIGKILL (9)"
std::string name_of_signal(int signal);

}  // namespace muster::launch
