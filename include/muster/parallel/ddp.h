// DistributedDataParallel: every rank holds the whole model and a part of each batch; gradients are averaged during
// backward.
//
//   muster::DistributedDataParallel ddp(net);
//   loss_function(ddp.forward(x), y).backward();      // gradients are averaged when backward() returns
//   optimizer.step();
//
// At construction parameters and buffers become those of rank 0. Gradients live in *buckets*: flat tensors on the
// World's heap. Small ones share buckets, of which each parameter's .grad is a view; one of 1 MiB or more is a bucket
// of its own, and is born there: autograd's allocations of exactly its size are served from the heap while backward
// runs. A hook after each gradient's accumulation marks it ready; a bucket whose gradients are all ready is all-reduced
// (AVG) at once, while backward goes on; backward() ends when all buckets are done. The first step's order of
// readiness, on rank 0, becomes the order of the buckets from then on.
//
// backward() throws, on every rank alike, InvalidArgument naming parameters that got no gradient on some rank, unless
// find_unused_parameters is set; then such a gradient counts as zero, and a parameter without gradient on all ranks
// keeps the .grad that it had. The gradients of the others are complete in either case.
//
// Results: the averaged gradients are equal to the bit on all ranks.
// Errors: Mismatch where ranks have different parameters (the first that differs is named, with both shapes); and those
// of all_reduce. Thread-safety: one thread, as an nn::Module. Source: torch.nn.parallel.DistributedDataParallel; Li et
// al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "muster/comm/group.h"

namespace muster {

struct DdpOptions {
  Group group;                          // default: all ranks
  size_t bucket_bytes = 25 << 20;       // a bucket of small gradients is closed before it exceeds this
  size_t first_bucket_bytes = 1 << 20;  // the first one is smaller, so that communication starts early
  bool find_unused_parameters = false;
  bool broadcast_buffers = true;  // rank 0's buffers to all before each forward in training mode
  // Large gradients are born on the heap, by a CPU allocator of DDP's that stands before the process's own from the
  // first such DDP on (docs/decisions/0005). false: this DDP does not ask for it, and copies its large gradients.
  bool replace_allocator = true;
};

namespace ddp {

// The part that does not depend on the module's type.
class Reducer {
 public:
  Reducer(std::shared_ptr<torch::nn::Module> module, DdpOptions options);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  ~Reducer();

  void before_forward();
  bool set_sync(bool on);                                      // returns what it was
  std::vector<std::vector<std::string>> bucket_names() const;  // parameters of each bucket, in order

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace ddp

template <typename ModuleType>
class DistributedDataParallel {
 public:
  explicit DistributedDataParallel(std::shared_ptr<ModuleType> module, DdpOptions options = {})
      : module_(std::move(module)), reducer_(module_, std::move(options)) {}
  explicit DistributedDataParallel(const torch::nn::ModuleHolder<ModuleType>& holder, DdpOptions options = {})
      : DistributedDataParallel(holder.ptr(), std::move(options)) {}

  template <typename... Arguments>
  auto forward(Arguments&&... arguments) {
    reducer_.before_forward();
    return module_->forward(std::forward<Arguments>(arguments)...);
  }
  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  // While the guard lives, backward() only accumulates, without communication. The first backward() after it averages
  // the sum.
  class NoSync {
   public:
    explicit NoSync(ddp::Reducer& reducer) : reducer_(reducer), before_(reducer.set_sync(false)) {}
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;
    ~NoSync() { reducer_.set_sync(before_); }

   private:
    ddp::Reducer& reducer_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(reducer_); }

  const std::shared_ptr<ModuleType>& module() const { return module_; }
  ModuleType* operator->() { return module_.get(); }
  // For tests and the curious: which parameters share a bucket, in the order of reduction.
  std::vector<std::vector<std::string>> bucket_names() const { return reducer_.bucket_names(); }

 private:
  std::shared_ptr<ModuleType> module_;
  ddp::Reducer reducer_;
};

}  // namespace muster
