// One operation of a group: what the caller wants, as one struct for all kinds.
//
// An Operation owns what it refers to, so it can wait in a queue. A SmallCall is the same for a blocking call that
// needs no queue: it refers to the caller's tensors and costs nothing to make.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <source_location>
#include <vector>

#include "comm/core/descriptor.h"
#include "comm/core/op_kind.h"
#include "muster/comm/group.h"

namespace muster::comm {

// For a caller that makes and uses the tensor of an all_reduce, a reduce or a broadcast block by block: while one block
// moves, ready() makes the next one, and done() uses the one before. Both get where the block begins, and its length,
// in elements, and run on the thread that executes the operation, in the order of in_turns(). done() is called where
// the operation writes the tensor, and on all ranks of an all_reduce and a broadcast; of a broadcast it may only read
// the block.
struct Blocks {
  size_t length = 0;  // of all blocks but the last one
  std::function<void(size_t begin, size_t length)> ready, done;
};

// Calls ready(i), move(i) and done(i) for each of `blocks` blocks, in the order in which they overlap.
template <typename Ready, typename Move, typename Done>
void in_turns(size_t blocks, Ready&& ready, Move&& move, Done&& done) {
  if (blocks == 0) return;
  ready(0);
  for (size_t i = 0; i < blocks; ++i) {
    if (i + 1 < blocks) ready(i + 1);
    move(i);
    if (i > 0) done(i - 1);
  }
  done(blocks - 1);
}

// One operation. The kind determines which fields are used:
//   all_reduce, broadcast, reduce, scan,
//   send, recv                                  tensor
//   all_gather, gather                          tensor = input; outputs: one per rank, or one for all
//   reduce_scatter, scatter                     tensor = output; inputs: one per rank, or one for all
//   all_to_all                                  inputs and outputs: one per rank each; or one tensor each, cut by the
//                                               splits (in rows, empty for equal ones)
// Lists of all_gather and reduce_scatter may have parts of unequal sizes; all ranks must pass the same sizes.
struct Operation {
  OpKind kind = OpKind::kBarrier;
  ReduceOp op = ReduceOp::SUM;
  int peer = 0;  // root, source or destination: a rank in the group; for recv also kAnySource
  int tag = 0;
  at::Tensor tensor;
  std::vector<at::Tensor> inputs, outputs;
  std::vector<int64_t> input_splits, output_splits;
  double factor = 1;                                 // of PREMUL_SUM, unless factor_tensor is defined
  at::Tensor factor_tensor;                          // of PREMUL_SUM: one element, or of the tensor's shape
  std::optional<at::ScalarType> between_hosts = {};  // of all_reduce and reduce: ReduceOptions
  std::chrono::milliseconds timeout{0};              // 0: the group's
  OpKind part_of = OpKind::kNothing;                 // set by backends that make one operation of several
  std::optional<CallDescriptor> announced;  // if this is a step of another operation: that operation, which the ranks
                                            // compare instead of this one
  const Blocks* blocks = nullptr;           // of a blocking call, and only where Backend::takes_blocks()
  std::source_location site = {};           // where the user called
};

CallDescriptor descriptor_of(const Operation& operation);  // Operation::announced, if there is one
Payload message_payload(const Operation& message);

// A blocking message, or a blocking collective of one tensor or of one input and one output tensor, with equal parts
// and no extras. It says what an Operation says, without the cost of making one.
struct SmallCall {
  OpKind kind = OpKind::kBarrier;  // kNothing: the call is not a small one
  ReduceOp op = ReduceOp::SUM;
  int peer = 0;
  const at::Tensor* tensor = nullptr;  // as Operation's; of an all_to_all, the output
  const at::Tensor* other = nullptr;   // the output of an all_gather, the input of a reduce_scatter or an all_to_all
  std::chrono::milliseconds timeout{0};
  const std::source_location& site;
  int tag = 0;
};

}  // namespace muster::comm
