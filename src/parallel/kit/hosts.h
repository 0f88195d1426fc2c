// Which ranks of a group share a host.
//
// Thread-safety: all functions.
#pragma once

#include <cstddef>
#include <vector>

#include "comm/core/members.h"
#include "muster/comm/group.h"
#include "muster/comm/world.h"

namespace muster::parallel {

// The hosts of a group's ranks. On each host the same number of ranks own parameters, and these are divided among them
// in the same way, so that an owner is known by its place among its host's ranks.
struct Hosts {
  std::vector<comm::Member> members;    // by rank in the group
  std::vector<std::vector<int>> ranks;  // by host: its ranks in the group, in order; the first host has rank 0
  size_t own = 0;                       // this rank's host
  int owners = 0;                       // on each host: as many ranks as the host with the fewest has

  const std::vector<int>& here() const { return ranks[own]; }
  int owner(int place) const { return here()[static_cast<size_t>(place)]; }  // on this host
  int place_of(int rank) const;                                              // among its host's ranks
  int owner_beside(int rank, int place) const;                               // on the host of `rank`

 private:
  const std::vector<int>& ranks_beside(int rank) const;
};
Hosts hosts_of(const Group& group, const World& world);

}  // namespace muster::parallel
