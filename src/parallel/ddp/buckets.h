// Buckets: flat tensors on the shared heap, each with the gradients of some parameters.
//
//   | grad of p0 | pad | grad of p1 | pad | … | used: one number per parameter |
//
// Gradients start on cache lines. `used` is 1 if this rank's backward() reached the parameter, or if an earlier one in
// no_sync() did. It is reduced with the gradients and becomes the share of ranks that reached the parameter, so it
// costs no extra communication to find unused parameters.
//
// Small gradients share buckets; they are copied into their bucket if autograd made them elsewhere. A large gradient
// (from GradientBlocks::kLarge on) has its own bucket. The bucket's memory is the block in which autograd made the
// gradient, if nobody else can reach that block; otherwise a value that backward has yet to read would be overwritten
// by the average.
//
// Thread-safety: none; one backward() at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "muster/comm/group.h"
#include "muster/comm/heap.h"
#include "muster/comm/work.h"
#include "parallel/ddp/gradient_blocks.h"

namespace muster::ddp {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

struct Parameter {
  std::string name;
  at::Tensor tensor;
  at::Tensor view;    // its gradient's place in the bucket; undefined for a large gradient that is not computed yet
  size_t bucket = 0;  // index
  bool ready = false;
  bool used = false;  // its gradient holds something that is not reduced yet; implied by `ready`
};

struct Bucket {
  std::vector<size_t> parameters;  // indices
  bool large = false;              // one parameter in a block
  at::Tensor flat, used;
  size_t pending = 0;
  Work work;
};

// Divides `order` into buckets of one dtype each; buckets of small parameters have at most `first_bytes` (the first) or
// `bytes`. A bucket's place in the list follows from its last parameter. Sets each parameter's view and bucket.
std::vector<Bucket> make_buckets(std::vector<Parameter>& parameters, const std::vector<size_t>& order,
                                 size_t first_bytes, size_t bytes, Heap& heap, GradientBlocks& blocks);

// For a large bucket: if `grad` was made in a block that nobody else can reach, it becomes the parameter's view.
// Returns whether it did.
bool adopt_block(Bucket& bucket, Parameter& parameter, const at::Tensor& grad, const GradientBlocks& blocks);
// Gives a free block to a large bucket whose parameter has no view.
void give_block(Bucket& bucket, Parameter& parameter, GradientBlocks& blocks);

void mark_used(Bucket& bucket, const std::vector<Parameter>& parameters);
std::vector<float> shares_used(const Bucket& bucket);  // after the reduction: 0 to 1 for each parameter

// Throws Mismatch on every rank if a rank differs from rank 0 in a tensor's name, dtype, shape, strides, whether it is
// trained, with which earlier tensor it is shared, or in `options`. Names the first difference.
void require_same_on_all_ranks(const std::vector<NamedTensor>& tensors, const std::string& options, const Group& group);
// Copies rank 0's values to all. Tensors of up to kCoalesced bytes travel together, in one broadcast.
inline constexpr size_t kCoalesced = 64 << 10;
void broadcast_from_first(const std::vector<NamedTensor>& tensors, const Group& group);

}  // namespace muster::ddp
