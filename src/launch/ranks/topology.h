// The cores of this machine, as hwloc knows them. hwloc is loaded when they are asked for, so a job without placement
// neither pays for it (milliseconds) nor needs it.
//
// Thread-safety: all functions.
#pragma once

#include <set>
#include <string>
#include <vector>

namespace muster::launch {

struct Core {
  int package = 0;              // the socket, counted from 0
  std::vector<int> processors;  // the CPUs of the kernel: one, or more with hyper-threading; sorted
};

// All cores in the machine's order: cores that share caches are neighbours, and the cores of a package lie together.
// Empty if hwloc is not installed or knows nothing.
std::vector<Core> cores_of_machine();

// The processors that this process may run on.
std::set<int> allowed_processors();

// Without the processors that are not in `allowed`, and without cores that lose all of theirs.
std::vector<Core> only(std::vector<Core> cores, const std::set<int>& allowed);

// A mask for sched_setaffinity(2).
std::vector<unsigned long> mask_of(const std::vector<int>& processors);

// "0-3, 8"
std::string name_of(const std::vector<int>& processors);

}  // namespace muster::launch
