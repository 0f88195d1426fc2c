// Collectives that autograd differentiates: each returns a new tensor, and its backward is the collective that carries
// gradients the other way. Every backward is made of these functions, so derivatives of any order work.
//
//   auto y = muster::functional::all_reduce(x * w);   // y: the sum over ranks
//   y.square().sum().backward();                      // w.grad: the gradient of the sum of all ranks' losses
//
// The gradient is that of the sum of all ranks' losses: it contains what a rank's x changes in the other ranks'
// results. All ranks must call backward(), and their graphs must have the same collectives in the same order.
//
//   forward                     backward
//   all_reduce SUM, AVG         all_reduce SUM, AVG
//   all_reduce MIN, MAX         all_reduce SUM, to the ranks that hold the extreme
//   broadcast from src          reduce SUM to src; zero elsewhere
//   reduce SUM, AVG to dst      broadcast from dst (the result elsewhere is zero)
//   all_gather                  reduce_scatter SUM
//   reduce_scatter SUM, AVG     all_gather
//   all_to_all                  all_to_all with the splits exchanged
//   send, recv                  recv, send
//
// Tensors, errors and thread-safety are as in muster/comm/collectives.h; a reduce operation that is not differentiable
// here throws InvalidArgument. Source: torch.distributed.nn.functional.
#pragma once

#include <ATen/core/Tensor.h>

#include "muster/comm/collectives.h"

namespace muster::functional {

at::Tensor all_reduce(const at::Tensor& input, const ReduceOptions& options = {}, const Site& site = Site::current());
at::Tensor broadcast(const at::Tensor& input, int src = 0, const CollectiveOptions& options = {},
                     const Site& site = Site::current());
at::Tensor reduce(const at::Tensor& input, int dst = 0, const ReduceOptions& options = {},
                  const Site& site = Site::current());
// Along dimension 0: size() times as many rows.
at::Tensor all_gather(const at::Tensor& input, const CollectiveOptions& options = {},
                      const Site& site = Site::current());
// Along dimension 0, which must be divisible by size(): this rank's part of the reduction.
at::Tensor reduce_scatter(const at::Tensor& input, const ReduceOptions& options = {},
                          const Site& site = Site::current());
// As all_to_all_single; the output has output_splits' rows, or as many as the input.
at::Tensor all_to_all(const at::Tensor& input, const AllToAllOptions& options = {}, const Site& site = Site::current());

// Sends `input`. The token returned is zero; add it to the loss (and to what is differentiated again). Otherwise
// autograd does not run this function's backward, which receives the gradient that the other rank sends back.
[[nodiscard]] at::Tensor send(const at::Tensor& input, int dst, const MessageOptions& options = {},
                              const Site& site = Site::current());
// Receives a tensor with the shape and dtype of `like`; the values of `like` are not read. If `like` requires grad, its
// gradient is zero.
at::Tensor recv(const at::Tensor& like, int src, const MessageOptions& options = {},
                const Site& site = Site::current());

}  // namespace muster::functional
