// Collective and point-to-point operations, in PyTorch's words.
//
// Every function has a blocking form, which returns when this rank's part is complete, and an asynchronous one
// (`…_async`, isend, irecv) that returns a Work at once. Without `.group` they run in the default group of the calling
// thread's World.
//
// Tensors: dense CPU tensors of any dtype for movement; of float64, float32, bfloat16, float16, int64, int32, int16,
// int8 or uint8 for reductions. Non-contiguous ones work, through one copy. Empty ones too. Tensors from World::heap()
// take the path without copies. The bits of a result depend neither on the path nor on the rank: reductions add in rank
// order 0 … N-1; bfloat16 and float16 accumulate in float32 and round once, to nearest even. AVG divides the sum by the
// group's size, before rounding; for integers the sum is taken in 64 bits and the quotient truncated. MIN and MAX
// propagate NaN.
//
// Errors, the same for all: InvalidArgument (before anything is sent: wrong device, layout, dtype, shape, root),
// Mismatch (on every rank, when ranks disagree about operation, dtype, size, root or reduce op), PeerLost (a member
// died or left), Timeout (who is missing, and what each did last), Aborted (an earlier error broke the group, or the
// World is closing). After any of the last four the group is of no more use: its outputs are undefined and each further
// call throws the same again.
//
// Source: torch.distributed (functions of the same name). Thread-safety: see group.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "muster/comm/group.h"
#include "muster/comm/work.h"

namespace muster {

inline constexpr std::chrono::milliseconds kDefaultTimeout{0};  // "the World's timeout"

struct CollectiveOptions {
  Group group;
  std::chrono::milliseconds timeout = kDefaultTimeout;
};

struct ReduceOptions {
  ReduceOp op = ReduceOp::SUM;
  Group group;
  std::chrono::milliseconds timeout = kDefaultTimeout;
};

struct AllToAllOptions {
  std::vector<int64_t> output_splits;  // rows (dimension 0) from each rank; empty: equal parts
  std::vector<int64_t> input_splits;   // rows to each rank; empty: equal parts
  Group group;
  std::chrono::milliseconds timeout = kDefaultTimeout;
};

struct MessageOptions {
  int tag = 0;  // a receive matches the oldest message from its source with the same tag
  Group group;
  std::chrono::milliseconds timeout = kDefaultTimeout;
};

// tensor := reduction of all ranks' tensors, on every rank. Same shape-independent size and dtype everywhere.
void all_reduce(const at::Tensor& tensor, const ReduceOptions& options = {});
Work all_reduce_async(const at::Tensor& tensor, const ReduceOptions& options = {});

// tensor := rank src's tensor.
void broadcast(const at::Tensor& tensor, int src = 0, const CollectiveOptions& options = {});
Work broadcast_async(const at::Tensor& tensor, int src = 0, const CollectiveOptions& options = {});

// As all_reduce, but only rank dst's tensor receives the result; the others' keep what they hold.
void reduce(const at::Tensor& tensor, int dst = 0, const ReduceOptions& options = {});
Work reduce_async(const at::Tensor& tensor, int dst = 0, const ReduceOptions& options = {});

// outputs[r] := rank r's input. One output a rank, each with the input's number of elements and dtype.
void all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, const CollectiveOptions& options = {});
Work all_gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                      const CollectiveOptions& options = {});

// output := all inputs one after another; output has size() times the input's elements.
void all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input, const CollectiveOptions& options = {});
Work all_gather_into_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                  const CollectiveOptions& options = {});

// output := reduction over the ranks of their inputs[rank()].
void reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, const ReduceOptions& options = {});
Work reduce_scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                          const ReduceOptions& options = {});

// The same with the inputs one after another in one tensor.
void reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input, const ReduceOptions& options = {});
Work reduce_scatter_tensor_async(const at::Tensor& output, const at::Tensor& input, const ReduceOptions& options = {});

// On rank dst: outputs[r] := rank r's input. Elsewhere outputs is empty.
void gather(const at::Tensor& input, const std::vector<at::Tensor>& outputs, int dst = 0,
            const CollectiveOptions& options = {});
Work gather_async(const at::Tensor& input, const std::vector<at::Tensor>& outputs, int dst = 0,
                  const CollectiveOptions& options = {});

// output := rank src's inputs[rank()]. Elsewhere than on src, inputs is empty.
void scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src = 0,
             const CollectiveOptions& options = {});
Work scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src = 0,
                   const CollectiveOptions& options = {});

// Part d of each rank's input goes to rank d; output := the parts received, in rank order.
void all_to_all_single(const at::Tensor& output, const at::Tensor& input, const AllToAllOptions& options = {});
Work all_to_all_single_async(const at::Tensor& output, const at::Tensor& input, const AllToAllOptions& options = {});

// One tensor from this rank to dst. A small message is buffered, and send returns at once; a large one waits for the
// receiver. Messages between two ranks with one tag arrive in the order sent. Sender and receiver must agree in size
// and dtype, else the receiver throws Mismatch.
void send(const at::Tensor& tensor, int dst, const MessageOptions& options = {});
void recv(const at::Tensor& tensor, int src, const MessageOptions& options = {});
Work isend(const at::Tensor& tensor, int dst, const MessageOptions& options = {});
Work irecv(const at::Tensor& tensor, int src, const MessageOptions& options = {});

// Returns when every rank has called it.
void barrier(const CollectiveOptions& options = {});
Work barrier_async(const CollectiveOptions& options = {});

}  // namespace muster
