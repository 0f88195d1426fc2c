// Buckets: flat tensors, on the shared heap or on the parameters' device, each with the gradients of some parameters.
//
//   | grad of p0 | pad | grad of p1 | pad | … | used: one number per parameter |
//
// Gradients start on cache lines. `used` is 1 if this rank's backward() reached the parameter, or if an earlier one in
// no_sync() did. It is reduced with the gradients and becomes the share of ranks that reached the parameter, so it
// costs no extra communication to find unused parameters. With static_graph it may be negative: then the graph was
// another one on a rank.
//
// Small gradients share buckets; they are copied into their bucket if autograd made them elsewhere. A large gradient on
// the CPU (from GradientBlocks::kLarge on) has its own bucket. The bucket's memory is the block in which autograd made
// the gradient, if nobody else can reach that block; otherwise a value that backward has yet to read would be
// overwritten by the average.
//
// A sparse gradient is its own bucket without memory: its elements are where autograd made them.
//
// Either all ranks keep a bucket's averages, or only its owner does (with several hosts, its owner on each), or of a
// large parameter in parts, each part's owner that of the part. Then it
// has gradients of parameters with that owner only, and a large bucket's memory is needed only while its gradient is:
// it has none before.
//
// Thread-safety: none; one backward() at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "muster/comm/heap.h"
#include "muster/comm/work.h"
#include "muster/parallel/comm_hook.h"
#include "parallel/kit/gradient_blocks.h"

namespace muster::parallel {

inline constexpr int kEveryRank = -1;
inline constexpr int kRanksOfParts = -2;

// Some rows of a tensor: along the dimension that is the outermost in memory. So they are one range of memory.
struct RowRange {
  int64_t dim = 0, begin = 0, count = 0;
  int64_t offset = 0, elements = 0;  // in the tensor's memory

  at::Tensor of(const at::Tensor& like) const { return like.narrow(dim, begin, count); }
};

// Some rows of a large parameter, with an owner of their own.
struct Rows {
  RowRange range;
  at::Tensor tensor;  // shares the parameter's memory; gets the gradient
  int owner = 0;
  at::Tensor average = {};  // on the owner, of the backward() under way
  bool had_zeros = false;   // as in Parameter
};

struct Parameter {
  std::string name;
  at::Tensor tensor;
  int owner = kEveryRank;        // the rank that keeps the average; if each host has one, that of this host
  std::vector<Rows> parts = {};  // if the owner is kRanksOfParts: they have all of it
  bool sparse = false;           // its gradient is in coordinate format
  std::optional<at::ScalarType> reduce_dtype = {};        // in which it travels between hosts; none: in its own
  decltype(torch::autograd::Edge::function) accumulator;  // with a hook of ours; null if every rank is the owner
  at::Tensor view;     // its gradient's place in the bucket; undefined for a large gradient that is not computed yet
  size_t bucket = 0;   // index
  int64_t offset = 0;  // of the view in the bucket, elements
  int gradients = 0;   // that have come in this backward()
  // Of them, after which it is ready. 0: at the end, because this is not known; or never, since it gets none (with
  // static_graph).
  int expected = 0;
  bool ready = false;
  bool used = false;  // its gradient holds something that is not reduced yet; implied by `ready`
  // The memory of what an earlier backward() has averaged and left as its gradient, and where in it that begins.
  // (zero_grad() makes another tensor of the same memory.)
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> average = {};
  int64_t average_at = 0;
  at::Tensor kept;         // such a gradient, to which this backward()'s average is to be added
  bool had_zeros = false;  // such a gradient was there, but only zeros: it is not kept
  // The values of a gradient that this backward() has not used, and that take part in the average only because other
  // ranks may add to theirs.
  at::Tensor unused;

  void note_average() {
    average.reset();
    if (const at::Tensor& grad = tensor.grad(); grad.defined()) {
      average.emplace(grad.storage().getWeakStorageImpl());
      average_at = grad.storage_offset();
    }
  }
  // Whether its gradient still is there, and not one that the user has made.
  bool has_average() const {
    const at::Tensor& grad = tensor.grad();
    return average && !average->expired() && grad.defined() && grad.has_storage() &&
           average->_unsafe_get_target() == grad.storage().unsafeGetStorageImpl() &&
           average_at == grad.storage_offset();
  }
};

struct Bucket {
  std::vector<size_t> parameters;  // indices
  bool large = false;              // one parameter in a block
  bool sparse = false;             // one parameter, and no tensor
  int owner = kEveryRank;
  std::optional<at::ScalarType> reduce_dtype = {};  // of all its parameters
  at::Tensor flat, used;
  int64_t elements = 0;  // of `flat` that belong to gradients, or lie between them
  at::Tensor gradients() const { return flat.narrow(0, 0, elements); }
  size_t pending = 0;
  std::vector<Work> works;           // of the reduction; several for a parameter in parts
  std::optional<HookFuture> future;  // with a communication hook

  bool is_reduced() const {
    return std::all_of(works.begin(), works.end(), [](const Work& work) { return work.is_completed(); });
  }
  void wait() {
    for (Work& work : works) work.wait();
  }
};

// The strides of a tensor that is dense, else those of a contiguous one of its shape.
std::vector<int64_t> dense_strides(const at::Tensor& tensor);
// A tensor with the shape, dtype and such strides of `like`, at this place in memory, whose size cannot change. It is
// on the memory's device.
at::Tensor tensor_at(c10::DataPtr memory, const at::Tensor& like);

// All parameters are on the same device. Divides `order` into buckets of one dtype, owner and reduce_dtype each; those
// of small parameters have at most `first_bytes` (the first) or `bytes`. A bucket's place in the list follows from its
// last parameter. Sets each parameter's view and bucket.
std::vector<Bucket> make_buckets(std::vector<Parameter>& parameters, const std::vector<size_t>& order,
                                 size_t first_bytes, size_t bytes, Heap& heap, GradientBlocks& blocks);

// For a large bucket: if `grad` was made in a block that nobody else can reach, it becomes the parameter's view.
// Returns whether it did.
bool adopt_block(Bucket& bucket, Parameter& parameter, const at::Tensor& grad, const GradientBlocks& blocks);
// Gives a free block, filled with zeros, to a large bucket whose parameter has no view.
void give_block(Bucket& bucket, Parameter& parameter, GradientBlocks& blocks);

// For a small bucket: whoever holds a parameter's view keeps its values, and the bucket gets another view.
void leave_to_holder(const Bucket& bucket, Parameter& parameter);

// Forgets the block of a large bucket: it is free when nobody else refers to it.
void release_block(Bucket& bucket, Parameter& parameter);

std::vector<float> shares_used(const Bucket& bucket);  // after the reduction: the average of `used`

}  // namespace muster::parallel
