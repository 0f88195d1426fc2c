#include "parallel/fsdp/owners.h"

#include "parallel/modules/balance.h"

namespace muster::fsdp {

int rank_of(const Owner& owner, const parallel::Hosts& hosts, int beside) {
  return owner.host == kEachHost ? hosts.owner_beside(beside, owner.place)
                                 : hosts.ranks[static_cast<size_t>(owner.host)][static_cast<size_t>(owner.place)];
}

std::vector<Owner> owners_on_each_host(const std::vector<parallel::NamedTensor>& parameters,
                                       const parallel::Hosts& hosts, size_t group_bytes) {
  std::vector<Owner> owners;
  for (const int place : parallel::Balance(hosts.owners).divide(parameters, group_bytes))
    owners.push_back({.place = place});
  return owners;
}

std::vector<Owner> owners_on_one_host(const std::vector<parallel::NamedTensor>& parameters,
                                      const std::vector<Unit>& units, const parallel::Hosts& hosts,
                                      size_t group_bytes) {
  const auto count = static_cast<int>(hosts.ranks.size());
  parallel::Balance balance(count * hosts.owners);
  std::vector<Owner> owners(parameters.size());
  for (const Unit& unit : units) {
    std::vector<parallel::NamedTensor> some;
    for (const size_t i : unit) some.push_back(parameters[i]);
    const auto divided = balance.divide(some, group_bytes);
    // Neighbours of a number are on different hosts, so that each host has about the same.
    for (size_t i = 0; i < unit.size(); ++i)
      owners[unit[i]] = {.place = divided[i] / count, .host = divided[i] % count};
  }
  return owners;
}

}  // namespace muster::fsdp
