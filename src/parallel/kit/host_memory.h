// Memory that the ranks of each host share, for parameters.
//
// Thread-safety: none; every rank of the group calls it in the same order.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/fd.h"
#include "muster/comm/group.h"
#include "muster/comm/world.h"
#include "parallel/kit/hosts.h"
#include "shm/mapping.h"

namespace muster::parallel {

struct HostMemory {
  UniqueFd own;
  std::vector<std::shared_ptr<shm::Mapping>> mapped;  // by rank in the group; null for other hosts
};

// Every rank makes memory of so many bytes, at least one page, and maps that of its host's ranks. Nothing of it is
// committed yet; a host will need `at_most` bytes of it. Errors: Unavailable, on every rank, if a host has too little
// memory now; those of shm::exchange() and of the collectives.
HostMemory share_memory(size_t bytes, size_t at_most, const Hosts& hosts, const Group& group, const World& world);

}  // namespace muster::parallel
