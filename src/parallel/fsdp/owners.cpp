#include "parallel/fsdp/owners.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "parallel/modules/balance.h"

namespace muster::fsdp {

int rank_of(const Owner& owner, const parallel::Hosts& hosts, int beside) {
  return owner.host == kEachHost ? hosts.owner_beside(beside, owner.place)
                                 : hosts.ranks[static_cast<size_t>(owner.host)][static_cast<size_t>(owner.place)];
}

Ownership owners_on_each_host(const std::vector<parallel::NamedTensor>& parameters, std::vector<RowPart> parts,
                              const parallel::Hosts& hosts, size_t group_bytes) {
  Ownership all{.owners = std::vector<Owner>(parameters.size()), .parts = std::move(parts)};
  // What is divided among owners, in the order of the parameters.
  std::vector<parallel::NamedTensor> whole_or_part;
  std::vector<Owner*> owners;
  all.owners_of_parts.resize(all.parts.size());
  size_t part = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool is_whole = part == all.parts.size() || all.parts[part].parameter != i;
    if (is_whole) {
      whole_or_part.push_back(parameters[i]);
      owners.push_back(&all.owners[i]);
    }
    for (; part < all.parts.size() && all.parts[part].parameter == i; ++part) {
      const auto options = parameters[i].tensor.options().device(at::kMeta).requires_grad(false);
      const at::Tensor like = at::empty({all.parts[part].range.elements}, options);
      whole_or_part.push_back({all.parts[part].name, like.set_requires_grad(true)});
      owners.push_back(&all.owners_of_parts[part]);
    }
  }
  const auto places = parallel::Balance(hosts.owners).divide(whole_or_part, group_bytes);
  for (size_t i = 0; i < places.size(); ++i) *owners[i] = {.place = places[i]};
  for (size_t i = all.parts.size(); i-- > 0;) all.owners[all.parts[i].parameter] = all.owners_of_parts[i];
  return all;
}

Ownership owners_on_one_host(const std::vector<parallel::NamedTensor>& parameters, const std::vector<Unit>& units,
                             const parallel::Hosts& hosts, size_t group_bytes) {
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
  return {.owners = std::move(owners)};
}

}  // namespace muster::fsdp
