// Communication hooks: what DistributedDataParallel does with a bucket of gradients instead of averaging it.
//
//   ddp.register_comm_hook([](muster::GradBucket& bucket) -> muster::HookFuture {
//     at::Tensor half = bucket.buffer().to(at::kHalf).div_(bucket.group().size());
//     auto sum = muster::all_reduce_async(half, {.group = bucket.group()});
//     return muster::HookFuture(sum, half).then([](at::Tensor half) { return half.to(at::kFloat); });
//   });
//
// backward() calls the hook for each bucket, on every rank in the same order, when this rank has the bucket's
// gradients. The hook starts communication, and returns the future of the tensor that the gradients become.
// comm_hooks.h has hooks that are made already.
//
// The bucket ends when the hook returns: a step keeps the tensors that it needs, not the bucket. Sparse gradients do
// not go through hooks; they are averaged over all ranks. If a hook throws on one rank only, the ranks are out of step,
// and the next collective says so.
//
// A future's further steps run in the thread of backward(), on every rank in the same order, so they need no lock and
// may communicate. A step that communicates returns a HookFuture. It runs when the hook has started the next bucket's
// communication (or at the end of backward()), after it has waited for the operations before it. A step that returns a
// tensor must not communicate. It runs as soon as the operations before it have completed, at the end of backward() at
// the latest.
//
// Thread-safety: none. Source: torch.distributed.GradBucket, DistributedDataParallel.register_comm_hook(); unlike
// there, a step never runs in another thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/comm/group.h"
#include "muster/comm/heap.h"
#include "muster/comm/work.h"

namespace muster {

class HookFuture {
 public:
  HookFuture(HookFuture&&) = default;
  HookFuture& operator=(HookFuture&&) = default;

  // A value that is there already.
  HookFuture(at::Tensor value) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor)
  // A value that is there when these operations have completed.
  HookFuture(Work work, at::Tensor value) : HookFuture(std::vector<Work>{std::move(work)}, std::move(value)) {}
  HookFuture(std::vector<Work> works, at::Tensor value) : works_(std::move(works)), value_(std::move(value)) {}

  // What `step` makes of the value: step(at::Tensor) returns a tensor, or a HookFuture if it communicates.
  template <typename Step>
  HookFuture then(Step step) && {
    constexpr bool communicates = std::is_same_v<std::invoke_result_t<Step&, at::Tensor>, HookFuture>;
    steps_.push_back(
        {[step = std::move(step)](at::Tensor value) mutable -> HookFuture { return step(std::move(value)); },
         communicates});
    return std::move(*this);
  }

  // Waits and runs steps up to the next one that communicates, if there is one; then further ones that do not, as far
  // as the operations before them have completed.
  void go_on();
  // Waits and runs all steps. Throws what they or the operations throw.
  at::Tensor get();

 private:
  struct Step {
    std::function<HookFuture(at::Tensor)> run;
    bool communicates;
  };
  void run_next_step();

  std::vector<Work> works_;
  at::Tensor value_;
  std::deque<Step> steps_;
};

// The gradients of some parameters, one after another in one tensor.
class GradBucket {
 public:
  struct Place {  // of one parameter's gradient
    std::string name;
    at::Tensor parameter;
    int64_t offset;  // in the buffer, elements
    std::vector<int64_t> strides;
    // The part of a tensor with the buffer's elements that is this gradient, with the parameter's shape.
    at::Tensor in(const at::Tensor& elements) const;
  };
  GradBucket(size_t index, size_t count, at::Tensor buffer, std::vector<Place> places, Group group,
             std::shared_ptr<Heap> heap, double scale = 1);

  size_t index() const { return index_; }
  bool is_last() const { return index_ + 1 == count_; }  // of this backward()
  // (elements), of the parameters' dtype, or the dtype that an outer hook has chosen. Up to 31 elements after a
  // gradient belong to none: zeros, or what a hook has written there.
  const at::Tensor& buffer() const { return buffer_; }
  // For a hook that calls another: one that has as many elements.
  void set_buffer(at::Tensor buffer);
  std::vector<at::Tensor> gradients() const;  // parts of buffer(), with the shapes of the parameters
  const std::vector<Place>& places() const { return places_; }
  const Group& group() const { return group_; }  // of the DistributedDataParallel
  // By which backward() multiplies what the hook gives: not 1 within join(), if some ranks have no more data and
  // averages are those of the others.
  double scale() const { return scale_; }
  // For a hook that does not average over all ranks, in each bucket: the ranks among which it does, or none but this
  // one. Then only these tell each other which parameters were used.
  void average_among(std::optional<Group> ranks) { averages_among_ = std::move(ranks); }
  const std::optional<Group>& averages_among() const { return averages_among_; }
  // (elements), uninitialised, on the heap, where ranks of one host reduce without a copy.
  at::Tensor empty(int64_t elements, at::ScalarType dtype) const;

 private:
  size_t index_, count_;
  at::Tensor buffer_;
  std::vector<Place> places_;
  Group group_;
  std::optional<Group> averages_among_;
  std::shared_ptr<Heap> heap_;
  double scale_;
};

// backward() throws InvalidArgument if the future gives an undefined tensor, or one of another size than the buffer.
using CommHook = std::function<HookFuture(GradBucket&)>;

}  // namespace muster
