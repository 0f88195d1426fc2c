// Which host and which process each rank of a group is.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "base/cores.h"

namespace muster::comm {

struct Member {
  int host = 0;        // hosts are numbered in the order of their first ranks
  pid_t pid = 0;       // 0: unknown
  uint64_t start = 0;  // start_time_of(pid): with the pid, it identifies the process
  CpuSet cpus;         // that it may run on
};

// By host: the indices of its members, in order; the host of members[0] comes first.
std::vector<std::vector<int>> by_host(const std::vector<Member>& members);
bool on_one_host(const std::vector<Member>& members);
// How many members are on the host of member `rank`, and how many cores these may use together.
int ranks_of_host(const std::vector<Member>& members, int rank);
int cores_of_host(const std::vector<Member>& members, int rank);

}  // namespace muster::comm
