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

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/algorithms/reduce_kernels.h"
#include "comm/backends/shm/channel.h"
#include "comm/bytes.h"

namespace muster::comm::shm_backend {

// The arguments of a collective besides its buffers. `count` and `item` describe the operation's unit: the whole tensor
// for all_reduce, broadcast and reduce; one rank's part for the others.
struct Call {
  OpKind op = OpKind::kNothing;
  OpKind part_of = OpKind::kNothing;
  size_t count = 0;  // elements
  size_t item = 1;   // bytes of one element
  uint8_t dtype = 0;
  ReduceOp redop = ReduceOp::SUM;
  ReduceKernel kernel = nullptr;
  int root = 0;
  uint64_t heap_offset = kNotOnHeap;
  Deadline deadline = Deadline::never();
  const CallDescriptor* announced = nullptr;  // Operation::announced, if there is one

  size_t bytes() const { return count * item; }
  Descriptor descriptor() const {
    if (announced) [[unlikely]]
      return {.call = *announced, .heap_offset = heap_offset};
    return {.call = {.count = count,
                     .root = static_cast<uint32_t>(root),
                     .op = op,
                     .dtype = dtype,
                     .redop = static_cast<uint8_t>(redop),
                     .part_of = part_of},
            .heap_offset = heap_offset};
  }
};

// Works in place. For OpKind::kReduce only the root's data changes.
void all_reduce(Channel& channel, const Call& call, Bytes data);
void broadcast(Channel& channel, const Call& call, Bytes data);
// outputs[r] of call.bytes() for each rank r, from inputs of call.bytes().
void all_gather(Channel& channel, const Call& call, std::span<const Bytes> outputs, ConstBytes input);
void gather(Channel& channel, const Call& call, std::span<const Bytes> outputs,
            ConstBytes input);  // outputs only on the root
void scatter(Channel& channel, const Call& call, Bytes output,
             std::span<const ConstBytes> inputs);  // inputs only on the root
void reduce_scatter(Channel& channel, const Call& call, Bytes output, std::span<const ConstBytes> inputs);

// send[d] bytes from inputs[d] go to rank d; receive[s] bytes from rank s to outputs[s].
struct AllToAllParts {
  std::span<const ConstBytes> inputs;
  std::span<const Bytes> outputs;
  std::span<const uint64_t> send, receive;
};
void all_to_all(Channel& channel, const Call& call, const AllToAllParts& parts);
void barrier(Channel& channel, const Call& call);

}  // namespace muster::comm::shm_backend
