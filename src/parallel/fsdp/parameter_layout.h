// Where parameters lie in the memory of their hosts' ranks.
//
// Thread-safety: all functions.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "parallel/fsdp/gatherer.h"
#include "parallel/fsdp/owners.h"
#include "parallel/fsdp/units.h"
#include "parallel/kit/hosts.h"
#include "parallel/modules/same_module.h"

namespace muster::fsdp {

// The same on every host: the rank at a place among the ranks of its host has the parameters of the owners at this
// place.
struct ParameterLayout {
  std::vector<size_t> offsets;  // of parameters, bytes in the memory of their places
  std::vector<size_t> bytes;    // by place
  // By place and unit, if each parameter has one owner on one host.
  std::vector<std::vector<std::vector<Gatherer::Piece>>> pieces;
  size_t at_most = 0;  // bytes that a host needs: of the host that needs most

  // By unit, what is at home on another host than `host`, in the memory of this host's ranks; memory: by place.
  std::vector<std::vector<std::span<std::byte>>> elsewhere(int host, const std::vector<std::byte*>& memory) const;
};

size_t room_for(const at::Tensor& tensor);  // bytes, with those up to the next one

// units: none if each host has an owner of each parameter; most: as Gatherer's.
ParameterLayout lay_out(const std::vector<parallel::NamedTensor>& parameters, const std::vector<Owner>& owners,
                        const parallel::Hosts& hosts, const std::vector<Unit>& units, size_t most);

}  // namespace muster::fsdp
