// The cores of this machine, as hwloc knows them. hwloc is loaded when they are asked for: a job without placement does
// not pay for it (it takes milliseconds), and needs none.
//
// Thread-safety: all of it.
#pragma once

#include <set>
#include <string>
#include <vector>

namespace muster::launch {

struct Core {
  int package = 0;              // the socket, counted from 0
  std::vector<int> processors;  // what the kernel calls CPUs: one, or more with hyper-threading; sorted
};

// All cores in the machine's order: those that share caches are neighbours, and those of a package lie together. Empty
// where hwloc is not here or knows nothing.
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
