// Which rank owns which parameter: it holds the gradient and the optimizer's state, and updates the parameter.
//
// Thread-safety: all functions.
#pragma once

#include <cstddef>
#include <vector>

#include "parallel/fsdp/row_parts.h"
#include "parallel/fsdp/units.h"
#include "parallel/kit/hosts.h"
#include "parallel/modules/same_module.h"

namespace muster::fsdp {

inline constexpr int kEachHost = -1;

// The rank at a place among the ranks of its host: on each host, or on one.
struct Owner {
  int place = 0;
  int host = kEachHost;  // index into Hosts::ranks
};
// The rank in the group that owns a parameter, as rank `beside` sees it: if each host has an owner, that of its host.
int rank_of(const Owner& owner, const parallel::Hosts& hosts, int beside);

// The owners of all parameters: one on each host, or one of the ranks of all hosts, with each unit divided among these.
struct Ownership {
  std::vector<Owner> owners;   // by parameter; of one in parts, the rank in whose memory it lies
  std::vector<RowPart> parts;  // one after the other
  std::vector<Owner> owners_of_parts;
};
Ownership owners_on_each_host(const std::vector<parallel::NamedTensor>& parameters, std::vector<RowPart> parts,
                              const parallel::Hosts& hosts, size_t group_bytes);
Ownership owners_on_one_host(const std::vector<parallel::NamedTensor>& parameters, const std::vector<Unit>& units,
                             const parallel::Hosts& hosts, size_t group_bytes);

}  // namespace muster::fsdp
