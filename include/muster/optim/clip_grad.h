// Clips gradients between backward() and step(): by the norm of all of them together, or each element by itself.
//
//   loss.backward();
//   const double norm = muster::clip_grad_norm_(net->parameters(), 1.0);
//   optimizer.step();
//
// DistributedDataParallel gives every rank the same gradients, so each rank finds the true global norm without
// communication. If each rank has other gradients, name the group (`sharded_over`): then the norm is that of all ranks'
// gradients, in one all_reduce of 16 bytes, and every rank of the group calls it. FullyShardedDataParallel does this:
// call its clip_grad_norm_(), not this one.
//
// After GradScaler::scale(), call unscale_() first.
//
// Norms are of any order above 0. Those of bfloat16 and float16 gradients are computed in float32. One thread computes
// them, or several (at::set_num_threads()); the last bit may depend on how many.
//
// Errors: InvalidArgument, before anything has changed, for arguments out of their range and for sparse gradients; in a
// group on all ranks, and those of all_reduce. Thread-safety: as at::Tensor; nobody else may use the gradients
// meanwhile. Source: torch.nn.utils.clip_grad.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>

#include "muster/comm/group.h"

namespace muster {

struct ClipGradNormOptions {
  double norm_type = 2;             // above 0: 1, 2, …, or infinity for the largest absolute value
  bool error_if_nonfinite = false;  // InvalidArgument if the norm is infinite or NaN; no gradient has changed
  // Whether a list of gradients goes to one operator of libtorch's (_foreach_norm). Default: on CUDA devices.
  std::optional<bool> foreach = {};
  std::optional<Group> sharded_over = {};  // ranks that have different gradients; none: all have the same
  int copies = 1;                          // of sharded_over: how many of its ranks have a given gradient
};

// Multiplies the gradients by max_norm / (norm + 1e-6) if that is below 1. Returns the norm before: that of all
// elements, as of one vector; 0 if there are none. Parameters without a gradient are left out. Gradients may have any
// shapes, floating-point dtypes and devices; max_norm is 0 or more.
//
// As in PyTorch, a norm of NaN makes all gradients NaN, and an infinite one makes them 0 or NaN.
double clip_grad_norm_(at::TensorList parameters, double max_norm, const ClipGradNormOptions& options = {});

// Moves each element of each gradient into [-clip_value, clip_value]; NaN stays. clip_value is 0 or more. It needs no
// other rank, however the gradients are distributed. `foreach`: as above.
void clip_grad_value_(at::TensorList parameters, double clip_value, std::optional<bool> foreach = {});

}  // namespace muster
