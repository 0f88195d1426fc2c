// The ranks as processes: signals to them, their ends, and nobody left behind.
//
// No rank is reaped before reap(), also when it has ended long before. So its process id, which is also its group's,
// cannot come to belong to a stranger, and SIGKILL to the group is safe at any time, here and in the guardian.
//
// Thread-safety: none.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "launch/last_lines.h"
#include "launch/output.h"
#include "muster/base/deadline.h"

namespace muster::launch {

// How long a process may take to end after SIGKILL. Only one that hangs in the kernel takes longer.
inline constexpr std::chrono::seconds kDeathTakes{10};

struct Rank {
  int number = 0;  // in the job
  pid_t pid = 0;
  UniqueFd pidfd;  // readable when it has ended
  bool ended = false;
  bool well = false;       // and with status 0
  bool replaces = false;   // another, which was lost, and has not been called away from run() since
  bool taken = false;      // somebody else in this process reaped it, so its id may be a stranger's now
  std::string end;         // how it ended, in words; empty: not yet
  std::string error_path;  // where it may write its own error file; empty: nowhere
  UniqueFd black_box;      // shm/black_box.h
  LastLines last_lines;    // of its standard error
  RankStream out, err;
};

class RankProcesses {
 public:
  RankProcesses() = default;
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;
  ~RankProcesses();  // ends and reaps what is left

  // Takes over a process that was just started. Its Rank keeps its address.
  Rank& add(std::unique_ptr<Rank> rank);

  // Reaps one that has ended, to whose place another comes. The old Rank keeps its address, too, but is none of all().
  Rank& replace(size_t index, std::unique_ptr<Rank> rank);

  const std::vector<std::unique_ptr<Rank>>& all() const { return ranks_; }
  bool all_ended() const;

  void signal_groups(int signal) const;   // every process of every rank's group
  void signal_leaders(int signal) const;  // the ranks themselves, those that have not ended
  void reap();                            // those that have ended; afterwards only the destructor may follow

 private:
  static void watch(Rank& rank);

  std::vector<std::unique_ptr<Rank>> ranks_, replaced_;
  bool reaped_ = false;
};

// The processes that this one, a subreaper, adopted when their parents ended: all children but those in `not_these`.
class AdoptedProcesses {
 public:
  explicit AdoptedProcesses(std::vector<pid_t> not_these);
  std::vector<pid_t> list() const;
  void reap() const;                   // those that have ended
  void kill(Deadline deadline) const;  // all of them, and what these leave to us in turn

 private:
  std::vector<pid_t> not_these_;  // sorted
};

}  // namespace muster::launch
