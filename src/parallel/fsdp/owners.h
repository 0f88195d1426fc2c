// Which ranks own which parameter: one on each host, which holds its gradient and its optimizer's state, and updates it.
//
// Thread-safety: all functions.
#pragma once

#include <cstddef>
#include <vector>

#include "comm/core/members.h"
#include "muster/comm/group.h"
#include "muster/comm/world.h"
#include "parallel/same_module.h"

namespace muster::fsdp {

// The hosts of a group's ranks. On each host the same number of ranks own parameters, and these are divided among them in
// the same way, so that an owner is known by its place among its host's ranks.
struct Hosts {
  std::vector<comm::Member> members;    // by rank in the group
  std::vector<std::vector<int>> ranks;  // by host: its ranks in the group, in order; the first host has rank 0
  size_t own = 0;                       // this rank's host
  int owners = 0;                       // on each host: as many ranks as the host with the fewest has

  int owner(int place) const { return ranks[own][static_cast<size_t>(place)]; }  // on this host
  int owner_beside(int rank, int place) const;                                   // on the host of `rank`
};
Hosts hosts_of(const Group& group, const World& world);

// The places, below `owners`, of the ranks that own `parameters`: each rank owns about the same number of bytes, of those
// that require gradients and of the others. Small parameters that are neighbours stay together, up to `group_bytes`.
std::vector<int> balanced_places(const std::vector<parallel::NamedTensor>& parameters, int owners, size_t group_bytes);

}  // namespace muster::fsdp
