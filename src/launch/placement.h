// Which cores each rank runs on.
//
//   kNone    wherever the kernel likes
//   kCores   each rank on cores of its own, if there is one for each; else as kNone, with a reason
//   kAuto    as kCores where somebody has narrowed this process's affinity, so that its cores are meant for this job (a
//            batch system, a container's cpuset, taskset); elsewhere as kNone
//
// Why kAuto does not pin on a machine that is open to everybody: a pinned rank cannot move away from other work on its
// core, and waits with it for all ranks of the job; the kernel would have moved it. docs/decisions/ has more.
//
// Two jobs of Muster never pin to the same core: a job that pins holds a name for each of its cores, an abstract Unix
// socket that nobody listens on, which the kernel gives to one process at a time and frees when that dies. Cores whose
// names are taken are not used. The names reach as far as a network namespace does.
//
// How ranks lie. Each package (socket) gets ranks in proportion to its cores, and each of its ranks a block of
// neighbouring cores, so that no rank straddles two packages while there are as many ranks as packages; with fewer
// ranks, each gets whole packages. Blocks differ by one core at most within a package; hyper-threads go with their
// core. A package with far fewer cores than the others may stay empty, since the slowest rank counts.
//
// Thread-safety: all of it.
#pragma once

#include <string>
#include <vector>

#include "base/fd.h"
#include "launch/topology.h"
#include "muster/launch/launcher.h"

namespace muster::launch {

struct RankPlacement {
  std::vector<int> processors;  // empty: wherever the kernel likes
  int cores = 0;                // the number of cores they make up
};

struct Placement {
  std::vector<RankPlacement> ranks;  // one for each, or none at all: nobody is pinned
  int threads = 0;                   // for each rank: the least that one of them has in cores; 0: nobody is pinned
  int cores = 0;                     // of all ranks together
  std::string why;                   // nobody is pinned, in words
  std::vector<UniqueFd> names;       // of the cores, held while this lives

  bool pinned() const { return !ranks.empty(); }
};

// For this process's job.
Placement place(int ranks, Pin pin);

// Shares out `cores`, which lie in order, among `ranks`; empty where there are more ranks than cores.
std::vector<RankPlacement> spread(const std::vector<Core>& cores, int ranks);

// The name that stands for a core is free, and now held; empty where it is not.
UniqueFd claim(const Core& core);

}  // namespace muster::launch
