// Which cores each rank runs on.
//
//   kNone    wherever the kernel likes
//   kCores   each rank on its own cores, if there is one for each; else as kNone, with a reason
//   kAuto    as kCores if this process's affinity is narrower than the machine, so that its cores are meant for this
//            job (a batch system, a container's cpuset, taskset); else as kNone
//
// kAuto does not pin on a machine that other programs use, too: a pinned rank cannot move away from other work on its
// core, and all ranks of the job wait for it; the kernel would have moved it. docs/decisions/ has more.
//
// Two jobs of Muster never pin to the same core. A job that pins holds a name for each of its cores: an abstract Unix
// socket without a listener, which the kernel gives to one process at a time and frees when that process dies. Cores
// whose names are taken are not used. The names are valid within a network namespace.
//
// Where ranks are placed: each package (socket) gets ranks in proportion to its cores, and each of its ranks a block of
// neighbouring cores, so that no rank straddles two packages while there are as many ranks as packages; with fewer
// ranks, each gets whole packages. Blocks differ by one core at most within a package; hyper-threads go with their
// core. A package with far fewer cores than the others may stay empty, because the slowest rank counts.
//
// Thread-safety: all functions.
#pragma once

#include <string>
#include <vector>

#include "base/fd.h"
#include "launch/ranks/topology.h"
#include "muster/launch/launcher.h"

namespace muster::launch {

struct RankPlacement {
  std::vector<int> processors;  // empty: wherever the kernel likes
  int cores = 0;                // the number of cores they make up
};

struct CorePlacement {
  std::vector<RankPlacement> ranks;  // one per rank; empty: no rank is pinned
  int threads = 0;                   // for each rank: the smallest number of cores of a rank; 0: no rank is pinned
  int cores = 0;                     // of all ranks together
  std::string why;                   // why no rank is pinned
  std::vector<UniqueFd> names;       // of the cores, held while this lives

  bool pinned() const { return !ranks.empty(); }
};

// For this process's job.
CorePlacement place(int ranks, Pin pin);

// Divides `cores`, which are in the machine's order, among `ranks`; empty if there are more ranks than cores.
std::vector<RankPlacement> spread(const std::vector<Core>& cores, int ranks);

// Takes the name of a core; empty if another process holds it.
UniqueFd claim(const Core& core);

}  // namespace muster::launch
