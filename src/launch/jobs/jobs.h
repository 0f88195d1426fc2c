// The jobs of this user on this host, as `muster ps` lists them. There is no registry: every process that holds a black
// box (black_box_sources.h) takes part in its job.
//
// The launcher holds the boxes of all its ranks and takes none for itself: of a box's holders it is the one whose
// parent holds none. The rank is the process that has taken the box. If no process has taken it (the rank has not made
// a World yet, or never makes one), the rank is the launcher's child that holds the box. Ranks that other launchers
// (mpirun, srun) started have their own boxes, and no known launcher.
//
// Thread-safety: all functions.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "launch/black_box/black_box_sources.h"

namespace muster::launch {

struct JobRank {
  int rank = 0;
  pid_t pid = 0;           // 0: there is no process
  bool has_world = false;  // it has joined a World
  std::string state;       // "running", "stopped", "gone"
};

struct JobSummary {
  std::string id, host;
  pid_t launcher = 0;  // 0: unknown
  int world_size = 0;
  std::vector<JobRank> ranks;  // those of this host, by rank
  std::string program;         // the first rank's command line
  int64_t since = 0;           // seconds of CLOCK_REALTIME
  double age = 0;              // seconds
  std::string state;           // "running", "starting", "rank 1 stopped", "stands still for 31 s in all_reduce #12"
};

JobSummary summarise(const JobBoxes& job);
std::vector<JobSummary> running_jobs();  // the oldest first

std::string jobs_table(const std::vector<JobSummary>& jobs, int columns);  // lines cut to `columns`; 0: not cut
std::string jobs_json(const std::vector<JobSummary>& jobs);

}  // namespace muster::launch
