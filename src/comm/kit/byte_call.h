// A collective on bytes: what remains of an operation when its tensors are plain memory. Algorithms take it, and know
// no tensors. tensor_bytes.h makes one of any operation.
//
// Thread-safety: values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <span>

#include "comm/algorithms/reduce_kernels.h"
#include "comm/core/bytes.h"
#include "comm/core/descriptor.h"
#include "muster/base/deadline.h"
#include "muster/comm/group.h"

namespace muster::comm {

struct Blocks;

// `count` and `item` describe the operation's unit: the whole tensor for all_reduce, reduce and broadcast; one rank's
// part for the others; count is 0 for all_to_all. The kind determines which buffers are used:
//   all_reduce, reduce, scan, broadcast
//                                   data, in place; of reduce only the root's is written
//   all_gather, gather              data = input; outputs: one per rank (of gather only on the root), bytes() each
//   reduce_scatter, scatter         data = output; inputs: one per rank (of scatter only on the root), bytes() each
//   all_to_all                      send[d] bytes from inputs[d] go to rank d; receive[s] bytes come from rank s to
//                                   outputs[s]
struct ByteCall {
  OpKind kind = OpKind::kNothing;
  OpKind part_of = OpKind::kNothing;
  ReduceOp op = ReduceOp::SUM;
  int root = 0;
  size_t count = 0;  // elements
  size_t item = 1;   // bytes of one element
  uint8_t dtype = 0;
  ReduceKernel kernel = nullptr;  // of operations that reduce
  Deadline deadline = Deadline::never();
  const CallDescriptor* announced = nullptr;  // Operation::announced, if there is one
  const Blocks* blocks = nullptr;             // Operation::blocks
  std::source_location site = {};

  Bytes data = nullptr;
  std::span<const ConstBytes> inputs;
  std::span<const Bytes> outputs;
  std::span<const uint64_t> send, receive;
  // The inputs are one tensor. Of an all_to_all, so are the outputs, in other memory.
  bool one_piece = false;
  // For backends that read each other's memory: where this rank's contribution lies on its heap.
  uint64_t heap_offset = kNotOnHeap;

  size_t bytes() const { return count * item; }
  CallDescriptor descriptor() const {
    if (announced) [[unlikely]]
      return *announced;
    return {.count = count,
            .root = static_cast<uint32_t>(root),
            .op = kind,
            .dtype = dtype,
            .redop = static_cast<uint8_t>(op),
            .part_of = part_of};
  }
};

}  // namespace muster::comm
