// From tensors to bytes: the one place where an operation's tensors become pointers, counts and kernels.
//
// run_on_bytes() does it for any Operation; SmallByteCall does it for a SmallCall, without allocation.
//
// Thread-safety: pure functions; a SmallByteCall belongs to one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/core/operation.h"
#include "comm/kit/byte_call.h"
#include "comm/kit/flatten.h"
#include "muster/base/deadline.h"

namespace muster::comm {

// Calls run(call) with the bytes of a valid collective of rank `rank` of `ranks`. Tensors that are not contiguous pass
// through contiguous copies.
void run_on_bytes(const Operation& operation, int rank, int ranks, Deadline deadline,
                  const std::function<void(ByteCall&)>& run);

// Whether a tensor's bytes are its elements in order. Almost all tensors are like that.
inline bool plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu() && tensor.is_contiguous() &&
         !tensor.is_neg() && !tensor.is_conj();
}

// The bytes of a small collective in a group of at most kMostRanks. Not copyable: the call points into this object. It
// is inline, except for a second tensor, because a call out of line costs 3 % of a barrier.
class SmallByteCall {
 public:
  static constexpr size_t kMostRanks = 64;

  SmallByteCall(const SmallCall& small, int ranks);
  SmallByteCall(const SmallByteCall&) = delete;
  SmallByteCall& operator=(const SmallByteCall&) = delete;

  // False for every call that is not certainly valid. The caller then takes the way of an Operation, which validates.
  bool valid() const { return valid_; }
  ByteCall& call() { return call_; }
  at::ScalarType dtype() const { return dtype_; }
  // The size of this rank's payload, and of what it contributes for others to read.
  size_t payload() const { return call_.kind == OpKind::kAllToAll ? contribution_ : call_.bytes(); }
  size_t contribution() const { return contribution_; }

 private:
  bool add_other(const at::Tensor& tensor, const at::Tensor& second, size_t n);

  ByteCall call_;
  bool valid_ = false;
  at::ScalarType dtype_ = at::kByte;
  size_t contribution_ = 0;
  std::array<ConstBytes, kMostRanks> inputs_;
  std::array<Bytes, kMostRanks> outputs_;
  std::array<uint64_t, kMostRanks> sizes_;
};

[[gnu::always_inline]] inline SmallByteCall::SmallByteCall(const SmallCall& small, int ranks)
    : call_{.kind = small.kind, .op = small.op, .root = small.peer, .site = small.site} {
  const auto n = static_cast<size_t>(ranks);
  if (small.kind == OpKind::kNothing) return;
  if (small.kind == OpKind::kBarrier) {
    valid_ = true;
    return;
  }
  const at::Tensor* const tensor = small.tensor;
  if (n > kMostRanks || !tensor || !plain(*tensor) || (small.other && !plain(*small.other))) return;
  if (small.peer < 0 || small.peer >= ranks) return;
  dtype_ = tensor->scalar_type();
  call_.count = static_cast<size_t>(tensor->numel());
  call_.item = tensor->element_size();
  call_.dtype = static_cast<uint8_t>(dtype_);
  call_.data = data_of(*tensor);
  contribution_ = call_.bytes();
  if (reduces(small.kind)) {
    call_.kernel = small.op == ReduceOp::PREMUL_SUM ? nullptr : reduce_kernel(dtype_, small.op);
    if (!call_.kernel) return;
  }
  valid_ = !small.other || add_other(*tensor, *small.other, n);
}

// The second tensor of a call. Out of line: it would slow down the calls that have none.
[[gnu::noinline]] inline bool SmallByteCall::add_other(const at::Tensor& tensor, const at::Tensor& second, size_t n) {
  const auto each = [&](Bytes data, size_t bytes, auto& pointers) {
    for (size_t r = 0; r < n; ++r) pointers[r] = data + r * bytes;
  };
  if (second.scalar_type() != dtype_) return false;
  const Bytes other = data_of(second);
  // Parts that are the same memory do no harm. run_on_bytes() copies tensors that overlap in another way.
  const size_t own = call_.bytes();
  const auto overlap = [&](size_t others) { return call_.data < other + others && other < call_.data + own; };
  if (call_.kind == OpKind::kAllToAll) {  // `tensor` has all parts, not one
    if (call_.count % n != 0 || (tensor.dim() > 0 && tensor.size(0) % static_cast<int64_t>(n) != 0) ||
        second.sizes() != tensor.sizes() || (overlap(own) && call_.data != other))
      return false;
    const size_t part = call_.bytes() / n;
    each(call_.data, part, outputs_);
    each(other, part, inputs_);
    std::fill_n(sizes_.begin(), n, part);
    call_.inputs = std::span(inputs_).first(n);
    call_.outputs = std::span(outputs_).first(n);
    call_.send = call_.receive = std::span(sizes_).first(n);
    call_.count = 0;
  } else if (static_cast<size_t>(second.numel()) != call_.count * n ||
             (overlap(own * n) && (call_.data - other) % static_cast<ptrdiff_t>(own) != 0)) {
    return false;
  } else if (call_.kind == OpKind::kReduceScatter) {
    each(other, call_.bytes(), inputs_);
    call_.inputs = std::span(inputs_).first(n);
    contribution_ *= n;
  } else {
    each(other, call_.bytes(), outputs_);
    call_.outputs = std::span(outputs_).first(n);
  }
  return true;
}

// Pointers to each rank's part of contiguous tensors: one tensor per rank, or one with room for all.
template <typename Pointer>
std::vector<Pointer> parts_of(const std::vector<at::Tensor>& tensors, size_t ranks, size_t bytes_each) {
  std::vector<Pointer> pointers;
  if (tensors.empty()) return pointers;
  for (size_t r = 0; r < ranks; ++r)
    pointers.push_back(tensors.size() == 1 && ranks > 1 ? data_of(tensors[0]) + r * bytes_each : data_of(tensors[r]));
  return pointers;
}

}  // namespace muster::comm
