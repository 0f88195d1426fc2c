// Which of the ranks that failed is the cause, and how to say so.
//
// Thread-safety: values.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "launch/last_lines.h"
#include "muster/base/deadline.h"
#include "muster/launch/launcher.h"

namespace muster::launch {

struct Failure {
  int rank = 0;
  pid_t pid = 0;
  int exit_status = 0;  // where signal is 0
  int signal = 0;
  bool dumped_core = false;
  bool unknown = false;  // somebody else in this process took its exit status
  Clock::time_point when;
  const LastLines* last_lines = nullptr;  // of its standard error

  // Whether the rank only says that another one went away: its exception is muster::PeerLost or muster::Aborted.
  bool is_consequence() const;
};

// The cause among `failures`, which are in the order in which we learned of them; at least one. The first, unless a
// better one came within `settle` (LaunchOptions): deaths by a signal before exits, consequences last.
const Failure& choose_cause(const std::vector<Failure>& failures, std::chrono::milliseconds settle);

// `operations`: the rank's last ones, in words.
Outcome describe(const Failure& cause, std::vector<std::string> operations = {});
Outcome describe_stop(int signal);  // the user ended the job

// "exited with status 3", "killed by SIGKILL (9)"
std::string end_of(const Failure& failure);

// "SIGKILL (9)"
std::string name_of_signal(int signal);

}  // namespace muster::launch
