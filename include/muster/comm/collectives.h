// Collective and point-to-point operations, in PyTorch's words.
//
// Every function has a blocking form, which returns when this rank's part is complete, and an asynchronous one
// (`…_async`, isend, irecv) that returns a Work immediately. Without `.group` they run in the default group of the
// calling thread's World. With backend nccl an operation is complete when it is enqueued on the current CUDA stream, as
// in PyTorch: work enqueued there later sees its result; the host must synchronize the stream before it reads it.
//
// Tensors: dense CPU tensors of any dtype for movement (8-bit floats too). Reductions: SUM, AVG, PRODUCT, MIN and MAX
// of float64, float32, bfloat16, float16 and all integers; SUM, AVG and PRODUCT of complex; bitwise BAND, BOR and BXOR
// of integers; all but AVG of bool, for which SUM and MAX mean "or", PRODUCT and MIN mean "and"; PREMUL_SUM of floats
// and complex (each rank's tensor is multiplied by its factor first). Non-contiguous tensors work, through one copy.
// Empty tensors work, too. Tensors from World::heap() take the path without copies. The bits of a result depend neither
// on the path nor on the rank: reductions add in rank order 0 … N-1; bfloat16 and float16 accumulate in float32 and
// round once, to nearest even. AVG divides the sum by the group's size, before rounding; for integers the sum is
// computed in 64 bits and the quotient is truncated. MIN and MAX propagate NaN.
//
// Every function throws the same errors: InvalidArgument (before anything is sent: wrong device, layout, dtype, shape,
// root), Mismatch (on every rank, when ranks disagree about operation, dtype, size, root or reduce op), PeerLost (a
// member died or left), TimeoutError (names the missing ranks, and what each did last), Aborted (an earlier error broke
// the group, or the World is closing). After any of the last four the group cannot be used any more: its outputs are
// undefined and each further call throws the same error again.
//
// Source: torch.distributed (functions of the same name). Thread-safety: see group.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
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
  double factor = 1;  // this rank's factor for PREMUL_SUM
  // For all_reduce and reduce of floating-point tensors on several hosts: each host's sum travels in this dtype, and is
  // rounded to it. Fewer bytes, fewer digits. Not with backend gloo or mpi on their own.
  std::optional<at::ScalarType> between_hosts = {};
};

struct AllToAllOptions {
  std::vector<int64_t> output_splits;  // rows (dimension 0) from each rank; empty: equal parts
  std::vector<int64_t> input_splits;   // rows to each rank; empty: equal parts
  Group group;
  std::chrono::milliseconds timeout = kDefaultTimeout;
};

struct MessageOptions {
  int tag = 0;  // 0 … 2^28 - 2; a receive matches the oldest message from its source with the same tag
  Group group;
  std::chrono::milliseconds timeout = kDefaultTimeout;
};

// tensor := reduction of all ranks' tensors, on every rank. Every rank's tensor has the same number of elements (in any
// shape) and the same dtype. A sparse tensor (COO; SUM or AVG) becomes the coalesced sum; its indices may differ
// between ranks.
void all_reduce(const at::Tensor& tensor, const ReduceOptions& options = {}, const Site& site = Site::current());
Work all_reduce_async(const at::Tensor& tensor, const ReduceOptions& options = {}, const Site& site = Site::current());

// tensor := rank src's tensor.
void broadcast(const at::Tensor& tensor, int src = 0, const CollectiveOptions& options = {},
               const Site& site = Site::current());
Work broadcast_async(const at::Tensor& tensor, int src = 0, const CollectiveOptions& options = {},
                     const Site& site = Site::current());

// As all_reduce, but only rank dst's tensor receives the result; the other ranks' tensors stay as they are.
void reduce(const at::Tensor& tensor, int dst = 0, const ReduceOptions& options = {},
            const Site& site = Site::current());
Work reduce_async(const at::Tensor& tensor, int dst = 0, const ReduceOptions& options = {},
                  const Site& site = Site::current());

// tensor := reduction of the tensors of the ranks 0 … rank(), in that order. AVG divides by rank() + 1. Source:
// MPI_Scan.
void scan(const at::Tensor& tensor, const ReduceOptions& options = {}, const Site& site = Site::current());
Work scan_async(const at::Tensor& tensor, const ReduceOptions& options = {}, const Site& site = Site::current());

// outputs[r] := rank r's input. One output per rank, each with the dtype and number of elements of that rank's input.
// If these numbers differ between ranks, all ranks must give outputs of the same sizes.
void all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, const CollectiveOptions& options = {},
                const Site& site = Site::current());
Work all_gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                      const CollectiveOptions& options = {}, const Site& site = Site::current());

// output := all inputs one after another; output has size() times the input's elements.
void all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input, const CollectiveOptions& options = {},
                            const Site& site = Site::current());
Work all_gather_into_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                  const CollectiveOptions& options = {}, const Site& site = Site::current());

// output := reduction over the ranks of their inputs[rank()]. Inputs may be of unequal sizes, the same on all ranks.
void reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, const ReduceOptions& options = {},
                    const Site& site = Site::current());
Work reduce_scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                          const ReduceOptions& options = {}, const Site& site = Site::current());

// As reduce_scatter, with the inputs one after another in one tensor.
void reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input, const ReduceOptions& options = {},
                           const Site& site = Site::current());
Work reduce_scatter_tensor_async(const at::Tensor& output, const at::Tensor& input, const ReduceOptions& options = {},
                                 const Site& site = Site::current());

// On rank dst: outputs[r] := rank r's input. On the other ranks outputs is empty.
void gather(const at::Tensor& input, const std::vector<at::Tensor>& outputs, int dst = 0,
            const CollectiveOptions& options = {}, const Site& site = Site::current());
Work gather_async(const at::Tensor& input, const std::vector<at::Tensor>& outputs, int dst = 0,
                  const CollectiveOptions& options = {}, const Site& site = Site::current());

// output := rank src's inputs[rank()]. On ranks other than src, inputs is empty.
void scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src = 0,
             const CollectiveOptions& options = {}, const Site& site = Site::current());
Work scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src = 0,
                   const CollectiveOptions& options = {}, const Site& site = Site::current());

// Part d of each rank's input goes to rank d; output := the parts received, in rank order.
void all_to_all_single(const at::Tensor& output, const at::Tensor& input, const AllToAllOptions& options = {},
                       const Site& site = Site::current());
Work all_to_all_single_async(const at::Tensor& output, const at::Tensor& input, const AllToAllOptions& options = {},
                             const Site& site = Site::current());

// outputs[s] := what rank s gives as inputs[rank()]. Parts may have any sizes on which sender and receiver agree.
void all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                const CollectiveOptions& options = {}, const Site& site = Site::current());
Work all_to_all_async(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      const CollectiveOptions& options = {}, const Site& site = Site::current());

// all_reduce of each tensor, as one piece of work.
void all_reduce_coalesced(const std::vector<at::Tensor>& tensors, const ReduceOptions& options = {},
                          const Site& site = Site::current());
Work all_reduce_coalesced_async(const std::vector<at::Tensor>& tensors, const ReduceOptions& options = {},
                                const Site& site = Site::current());

// Sends one tensor from this rank to dst. A small message is buffered, and send returns immediately; for a large one,
// send waits for the receiver. Messages between two ranks with the same tag arrive in the order sent. Sender and
// receiver must agree on size and dtype, else the receiver throws Mismatch.
void send(const at::Tensor& tensor, int dst, const MessageOptions& options = {}, const Site& site = Site::current());
// Returns the rank that the message came from: src; or, for kAnySource, any rank of the group, this one included.
int recv(const at::Tensor& tensor, int src, const MessageOptions& options = {}, const Site& site = Site::current());
Work isend(const at::Tensor& tensor, int dst, const MessageOptions& options = {}, const Site& site = Site::current());
Work irecv(const at::Tensor& tensor, int src, const MessageOptions& options = {}, const Site& site = Site::current());

// Starts several messages, in the order given.
struct P2POp {
  enum Kind { kSend, kRecv } kind;
  at::Tensor tensor;
  int peer;
  MessageOptions options = {};
};
std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& operations, const Site& site = Site::current());

// Returns when every rank has called it.
void barrier(const CollectiveOptions& options = {}, const Site& site = Site::current());
Work barrier_async(const CollectiveOptions& options = {}, const Site& site = Site::current());

// A barrier whose TimeoutError names the ranks that did not come: all of them if wait_all_ranks is set, else the first.
void monitored_barrier(const CollectiveOptions& options = {}, bool wait_all_ranks = false);

}  // namespace muster
