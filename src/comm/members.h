// Which host and which process each rank of a group is. The ranks tell each other through the store when a World or a
// group begins.
//
// Thread-safety: all functions.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/cores.h"
#include "muster/base/deadline.h"
#include "muster/store/store.h"

namespace muster::comm {

struct Member {
  int host = 0;        // hosts are numbered in the order of their first ranks
  pid_t pid = 0;       // 0: unknown
  uint64_t start = 0;  // start_time_of(pid): with the pid, it identifies the process
  CpuSet cpus;         // that it may run on
};

// The identity of this host: the kernel's boot id and the network namespace, in which ranks can hand shared memory to
// each other. MUSTER_HOST overrides it; tests and containers use that to make several hosts of one.
std::string host_identity();

// Every rank calls it, with its host's identity. Returns the members by rank. Timeout names ranks that did not come.
std::vector<Member> meet_members(Store& store, const std::string& prefix, int rank, int size, const std::string& host,
                                 Deadline deadline);

// Removes from the store what the ranks told each other there. One rank calls it, when all have returned from
// meet_members(). A store that does not answer keeps it.
void forget_members(Store& store, const std::string& prefix, int size);

// Reads the list of all ranks that rank 0 leaves in the store, `said`, on rank `rank` of `size`. Corrupt, unless it is
// one; Mismatch and Timeout, if it says what rank 0 found wrong.
std::vector<Member> read_members(const std::string& said, int rank, int size);

bool on_one_host(const std::vector<Member>& members);
// How many cores the members on the host of member `rank` may use together.
int cores_of_host(const std::vector<Member>& members, int rank);

}  // namespace muster::comm
