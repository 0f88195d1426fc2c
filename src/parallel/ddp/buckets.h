// Buckets: flat tensors on the shared heap, each with the gradients of some parameters.
//
//   | grad of p0 | pad | grad of p1 | pad | … | used: one number a parameter |
//
// Gradients start on cache lines. `used` is 1 where this rank's backward() reached the parameter, or one in no_sync()
// before it did; reduced with the gradients it becomes the share of ranks that did, so finding out who is unused costs
// no communication of its own.
//
// Small gradients share buckets, into which they are copied where autograd made them elsewhere. A large one (from
// GradientBlocks::kLarge on) has a bucket of its own, whose memory is the block that it was born in, if nobody else can
// reach that: else what backward has yet to read would become the average.
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
  at::Tensor view;    // its gradient's place in the bucket; undefined while a large one is not born
  size_t bucket = 0;  // index
  bool ready = false;
  bool used = false;  // its gradient has something that was not reduced yet; ready implies it
};

struct Bucket {
  std::vector<size_t> parameters;  // indices
  bool large = false;              // one parameter in a block
  at::Tensor flat, used;
  size_t pending = 0;
  Work work;
};

// Cuts `order` into buckets of one dtype each; those of small parameters have at most `first_bytes` (the first) or
// `bytes`. A bucket's place in the list follows from its last parameter. Sets each parameter's view and bucket.
std::vector<Bucket> make_buckets(std::vector<Parameter>& parameters, const std::vector<size_t>& order,
                                 size_t first_bytes, size_t bytes, Heap& heap, GradientBlocks& blocks);

// For a large bucket: `grad`, if it was born in a block that nobody else can reach, becomes the parameter's view; false
// where it does not.
bool adopt_block(Bucket& bucket, Parameter& parameter, const at::Tensor& grad, const GradientBlocks& blocks);
// A free block for a large bucket whose parameter has no view.
void give_block(Bucket& bucket, Parameter& parameter, GradientBlocks& blocks);

void mark_used(Bucket& bucket, const std::vector<Parameter>& parameters);
std::vector<float> shares_used(const Bucket& bucket);  // after the reduction: 0 to 1 for each parameter

// Mismatch, on every rank, naming the first thing that is not rank 0's: a tensor's name, dtype, shape, strides, whether
// it is trained and with which earlier tensor it is shared; or `options`.
void require_same_on_all_ranks(const std::vector<NamedTensor>& tensors, const std::string& options, const Group& group);
// Rank 0's values to all. Tensors of up to kCoalesced bytes travel together, in one broadcast.
inline constexpr size_t kCoalesced = 64 << 10;
void broadcast_from_first(const std::vector<NamedTensor>& tensors, const Group& group);

}  // namespace muster::ddp
