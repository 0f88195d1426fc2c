// The ranks as processes: sends signals to them, notices their ends, and leaves no process behind.
//
// No rank is reaped before reap(), even if it ended long before. So no other process can get its process id, which is
// also the id of its group, and SIGKILL to the group is safe at any time, here and in the guardian.
//
// Thread-safety: none.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "launch/output/last_lines.h"
#include "launch/output/output.h"
#include "muster/base/deadline.h"

namespace muster::launch {

// How long a process may take to end after SIGKILL. Only a process that hangs in the kernel takes longer.
inline constexpr std::chrono::seconds kDeathTakes{10};

struct Rank {
  int number = 0;  // in the job
  pid_t pid = 0;
  UniqueFd pidfd;  // readable when it has ended
  bool ended = false;
  bool well = false;       // with status 0
  bool replaces = false;   // replaces a lost rank, and has not been called away from run() since
  bool taken = false;      // other code in this process reaped it, so its id may belong to another process now
  std::string end;         // how it ended, in words; empty: not yet
  std::string error_path;  // of the rank's own error file; empty: none
  UniqueFd black_box;      // shm/black_box.h
  LastLines last_lines;    // of its standard error
  RankStream out, err;
};

class RankProcesses {
 public:
  RankProcesses() = default;
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;
  ~RankProcesses();  // ends and reaps the processes that are left

  // Takes over a process that was just started. Its Rank keeps its address.
  Rank& add(std::unique_ptr<Rank> rank);

  // Reaps a rank that has ended, because another one takes its place. The old Rank keeps its address, too, but all() no
  // longer lists it.
  Rank& replace(size_t index, std::unique_ptr<Rank> rank);

  const std::vector<std::unique_ptr<Rank>>& all() const { return ranks_; }
  bool all_ended() const;

  void signal_groups(int signal) const;   // every process of every rank's group
  void signal_leaders(int signal) const;  // the ranks themselves, those that have not ended
  void reap();                            // reaps those that have ended; afterwards only the destructor may follow

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
  void kill(Deadline deadline) const;  // all of them, and the processes that this process then adopts from them

 private:
  std::vector<pid_t> not_these_;  // sorted
};

}  // namespace muster::launch
