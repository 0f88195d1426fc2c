// Collectives over a Channel, on plain bytes. The tiers, by size:
//
//   slot      what a rank contributes fits into its slot (4 KiB): it travels with the announcement; one synchronisation
//   in place  all_reduce up to Layout::early: contributions lie in staging before the announcement; rank r reduces
//             slice r and writes it back to where the contributions were; two synchronisations
//   direct    all_reduce of tensors that are on all ranks' heaps: the same, in the tensors; no copies
//   staged    everything else: a pipeline of turns through staging (turns.h)
//
// The tier follows from the descriptors, which all ranks have compared, so all ranks take the same tier. Reductions
// combine ranks 0, 1, …, N-1 in that order in every tier.
//
// Thread-safety: one call at a time on a Channel.
#pragma once

#include <cstdint>

#include "comm/backends/shm/channel.h"
#include "comm/kit/byte_call.h"

namespace muster::comm::shm_backend {

// The call's heap_offset is where this rank's contribution lies on its heap or, of an all_reduce, its tensor.
using Call = ByteCall;

inline Descriptor descriptor_of(const Call& call) {
  return {.call = call.descriptor(), .heap_offset = call.heap_offset};
}

void all_reduce(Channel& channel, const Call& call);  // and reduce
void broadcast(Channel& channel, const Call& call);
void all_gather(Channel& channel, const Call& call);  // and gather
void scatter(Channel& channel, const Call& call);
void reduce_scatter(Channel& channel, const Call& call);
void all_to_all(Channel& channel, const Call& call);
void scan(Channel& channel, const Call& call);
void barrier(Channel& channel, const Call& call);

}  // namespace muster::comm::shm_backend
