#include "parallel/kit/hosts.h"

#include <algorithm>

#include "comm/world/world_parts.h"

namespace muster::parallel {

int Hosts::place_of(int rank) const {
  const auto& host = ranks_beside(rank);
  return static_cast<int>(std::find(host.begin(), host.end(), rank) - host.begin());
}

int Hosts::owner_beside(int rank, int place) const { return ranks_beside(rank)[static_cast<size_t>(place)]; }

const std::vector<int>& Hosts::ranks_beside(int rank) const {
  return *std::find_if(ranks.begin(), ranks.end(), [&](const std::vector<int>& host) {
    return std::find(host.begin(), host.end(), rank) != host.end();
  });
}

Hosts hosts_of(const Group& group, const World& world) {
  Hosts hosts{.owners = group.size()};
  for (const int rank : group.ranks()) hosts.members.push_back(world.parts().members[static_cast<size_t>(rank)]);
  hosts.ranks = comm::by_host(hosts.members);
  for (size_t host = 0; host < hosts.ranks.size(); ++host) {
    const auto& ranks = hosts.ranks[host];
    if (std::find(ranks.begin(), ranks.end(), group.rank()) != ranks.end()) hosts.own = host;
    hosts.owners = std::min(hosts.owners, static_cast<int>(ranks.size()));
  }
  return hosts;
}

}  // namespace muster::parallel
