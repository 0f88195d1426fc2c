#include "parallel/hosts.h"

#include <algorithm>

#include "comm/world/world_parts.h"

namespace muster::parallel {

int Hosts::owner_beside(int rank, int place) const {
  for (const auto& host : ranks)
    if (std::find(host.begin(), host.end(), rank) != host.end()) return host[static_cast<size_t>(place)];
  return -1;
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
