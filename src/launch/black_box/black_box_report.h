// The contents of black boxes as text: a table of operations by time, and for each group which rank waits for which.
//
// Thread-safety: all of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/black_box/black_box_sources.h"

namespace muster::launch {

// The job and its ranks, a line each.
std::string describe_ranks(const JobBoxes& job);

// The last `each` operations of each rank, merged by the time at which they began.
std::string operations_table(const JobBoxes& job, size_t each);

// For each group: where its ranks are, and if they are not at the same collective, which rank is late and what it does
// instead.
std::string diagnosis(const JobBoxes& job);

// "all_reduce #12 of group 'world', 1.2 MiB, running for 3.1 s" for the last `count` operations of one rank, last last.
std::vector<std::string> last_operations(const shm::BlackBoxSnapshot& box, uint64_t now_ns, size_t count);

}  // namespace muster::launch
