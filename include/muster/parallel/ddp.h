// DistributedDataParallel: every rank holds the whole model and a part of each batch; gradients are averaged during
// backward.
//
//   muster::DistributedDataParallel ddp(net);
//   loss_function(ddp.forward(x), y).backward();      // gradients are averaged when backward() returns
//   optimizer.step();
//
// The constructor copies rank 0's parameters and buffers to all ranks. Gradients live in *buckets*: flat tensors on the
// World's heap. Small gradients share buckets, and each parameter's .grad is a view of its bucket. A gradient of 1 MiB
// or more is its own bucket and is allocated on the heap: while backward runs, the heap serves autograd's allocations
// of exactly its size. A hook after each gradient's accumulation marks it ready; when all gradients of a bucket are
// ready, the bucket is all-reduced (AVG) immediately, while backward goes on; backward() ends when all buckets are
// done. The order in which gradients become ready in the first step, on rank 0, becomes the order of the buckets from
// then on.
//
// backward() throws InvalidArgument, on every rank alike, which names the parameters that got no gradient on some rank,
// unless find_unused_parameters is set; then such a gradient counts as zero, and a parameter without a gradient on all
// ranks keeps the .grad that it had. The gradients of the other parameters are complete in either case.
//
// Gradients of an Embedding or EmbeddingBag with sparse(true) stay sparse: the average has the rows of all ranks.
//
// backward() may run inside of backward(), as in reentrant checkpoints (activation_checkpoint.h). Gradients are
// averaged at the end of a backward() that was called where forward() was: outside of any, or in the same node of the
// graph. A parameter may get several gradients, by several checkpoints. How many, backward() learns from those before:
// the first one averages at its end.
//
// backward() with create_graph averages as well: each .grad is a function of the parameters, and the backward() that
// goes through it communicates. torch::autograd::grad() gives this rank's gradients.
//
// A module on a CUDA device needs a group of backend nccl. Its buckets are on the device, and its large gradients are
// copied into buckets as the small ones are. Sparse gradients, `reproducible` and `mixed_precision` are for modules on
// the CPU.
//
// A DistributedDataParallel is not an nn::Module, because C++ modules have no common forward(). What belongs to the
// module is reached through it: ddp->parameters(), ddp.module()->to(…), torch::save(ddp.module(), …).
//
// Finding unused parameters costs nothing, or one small collective of CPU tensors with sparse gradients, a
// communication hook or a module on a device. With static_graph, backward() also knows them, and does not wait for
// them.
//
// Results: the averaged gradients are equal to the bit on all ranks.
// Errors: Mismatch if ranks have different parameters (it names the first that differs, with both shapes);
// InvalidArgument if a parameter gets more gradients in one backward() than in any before, when those are averaged;
// and those of all_reduce. Thread-safety: one thread, as an nn::Module. Source:
// torch.nn.parallel.DistributedDataParallel; Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
// Training", VLDB 2020.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "muster/comm/group.h"
#include "muster/parallel/comm_hook.h"
#include "muster/parallel/ddp_logging.h"
#include "muster/parallel/mixed_precision.h"
#include "muster/parallel/no_sync.h"

namespace muster {

template <typename ModuleType>
class DistributedDataParallel;
namespace ddp {
class Replica;
}

// One of several DistributedDataParallels in a join(), and what a rank without data calls after its backward().
class Joined {
 public:
  template <typename ModuleType>
  Joined(DistributedDataParallel<ModuleType>& ddp, std::function<void()> after_backward = {})  // NOLINT: not explicit
      : replica_(&ddp.replica_), after_backward_(std::move(after_backward)) {}

 private:
  friend class ddp::Replica;
  ddp::Replica* replica_;
  std::function<void()> after_backward_;
};

struct JoinOptions {
  // Gradients are averaged over all ranks, where ranks without data count as zeros; or over those with data. If .grad
  // still has an average when the next backward() adds to it, a rank without data counts as zero for the sum of both:
  // so call zero_grad() before each backward() that averages, or add up gradients in no_sync().
  bool divide_by_initial_world_size = true;
  bool throw_on_early_termination = false;  // InvalidArgument on all ranks when one has no more data
  // On a rank without data, after each backward() of the others, when .grad has the average: for example
  // [&] { optimizer.step(); }. Then all ranks have the same optimizer states at the end.
  std::function<void()> after_backward = {};
  // Others that `body` calls: the other network of a GAN, for example. All must have one group. In this join() they
  // average when a backward() has ended, not meanwhile. If a backward() goes through several, all of them average, and
  // then each has its after_backward; use no_sync() for one whose optimizer does not step after it.
  std::vector<Joined> with = {};
};

struct ReproducibleOptions {
  int shards = 0;     // of each global batch, a power of two that the number of ranks divides; 0: not reproducible
  uint64_t seed = 0;  // of random numbers in forward()
  int threads = 1;    // of libtorch's operators, because some sums depend on their number
};

struct DdpOptions {
  Group group;  // default: all ranks
  // MiB; a bucket of small gradients is closed before it exceeds this. Default: 1 to 25, by the speed of all_reduce in
  // the group, which the constructor measures if small gradients exceed the first bucket (docs/decisions/0020); 25 on
  // a device. Give it where runs on several hosts, or with a hook that compresses, are to be equal to the bit.
  std::optional<double> bucket_cap_mb = {};
  double first_bucket_cap_mb = 1;  // the first bucket is smaller, so that communication starts early
  bool find_unused_parameters = false;
  // In each backward() that averages, the same parameters get the same number of gradients as in the first; those that
  // get none there, on all ranks, need no find_unused_parameters, and no bucket waits for them. InvalidArgument, on
  // every rank alike, which names the parameters that got another number. Not compared: backward() with create_graph.
  bool static_graph = false;
  bool broadcast_buffers = true;  // rank 0's buffers to all before each forward in training mode
  // true: DDP allocates large gradients on the heap. For this, the first such DDP puts its own CPU allocator in front
  // of the process's (docs/decisions/0005). false: this DDP leaves the allocator alone, and copies its large gradients.
  bool replace_allocator = true;
  // Names of parameters and buffers that each rank keeps for itself: not copied from rank 0, not averaged.
  std::vector<std::string> ignored = {};
  // After every so many backward() calls that average, ranks compare hashes of their parameters and gradients. Without
  // broadcast_buffers also of buffers, except running statistics of norms that are not synchronized. backward() throws
  // Mismatch on all ranks, which names the first that differs, its ranks and the number of the call. 0: never. Not
  // within join().
  int64_t check_divergence_every = 0;
  ReproducibleOptions reproducible = {};  // see backward_by_shards()
  // What operators compute with in forward() and backward() (mixed_precision.h). Each rank has its own copies.
  MixedPrecision mixed_precision = {};
  // Names of parameters whose gradients are averaged after all others: of those that become ready late, although their
  // order in the first step says otherwise.
  std::vector<std::string> delay_all_reduce = {};
  // false: the constructor does not copy rank 0's values to all, because all ranks have the same ones, for example of
  // one checkpoint. It compares names, shapes and dtypes as always.
  bool init_sync = true;
};

namespace ddp {

// The part that does not depend on the module's type.
class Replica {
 public:
  Replica(std::shared_ptr<torch::nn::Module> module, DdpOptions options);
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;
  ~Replica();

  // The result lives as long as the module's forward(): so long operators compute in mixed precision, at least.
  [[nodiscard]] std::shared_ptr<void> before_forward();
  std::optional<at::ScalarType> input_dtype() const;
  std::optional<at::ScalarType> output_dtype() const;
  bool set_sync(bool on);  // returns the previous value
  void register_comm_hook(CommHook hook);
  std::vector<int> shards() const;
  at::Tensor backward_by_shards(uint64_t step, const std::function<at::Tensor(int shard)>& loss);
  void join(const std::function<void()>& body, JoinOptions options);
  std::vector<std::vector<std::string>> bucket_names() const;  // parameters of each bucket, in order
  DdpLoggingData logging_data() const;

 private:
  class InForward;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace ddp

template <typename ModuleType>
class DistributedDataParallel {
 public:
  explicit DistributedDataParallel(std::shared_ptr<ModuleType> module, DdpOptions options = {})
      : module_(std::move(module)), replica_(module_, std::move(options)) {}
  explicit DistributedDataParallel(const torch::nn::ModuleHolder<ModuleType>& holder, DdpOptions options = {})
      : DistributedDataParallel(holder.ptr(), std::move(options)) {}

  template <typename... Arguments>
  auto forward(Arguments&&... arguments) {
    const auto in_forward = replica_.before_forward();
    return parallel::with_output_dtype(
        replica_.output_dtype(), [&](auto&&... inputs) { return module_->forward(inputs.get()...); },
        parallel::Input<Arguments>(std::forward<Arguments>(arguments), replica_.input_dtype())...);
  }
  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  // While the guard lives, backward() only accumulates, without communication. The first backward() after it averages
  // the sum.
  using NoSync = NoSyncGuard<ddp::Replica>;
  [[nodiscard]] NoSync no_sync() { return NoSync(replica_); }

  // From now on backward() calls this for each bucket instead of averaging it (comm_hook.h, comm_hooks.h). All ranks
  // must register the same, before or between backward() calls. InvalidArgument if there is a hook already.
  void register_comm_hook(CommHook hook) { replica_.register_comm_hook(std::move(hook)); }
  template <typename State>
  void register_comm_hook(State state, HookFuture (*hook)(State&, GradBucket&)) {
    register_comm_hook([state = std::move(state), hook](GradBucket& bucket) mutable { return hook(state, bucket); });
  }

  // For ranks with different numbers of batches: runs `body`, a loop over this rank's batches, and then takes part in
  // the collectives of the ranks whose loops are longer, until the last one ends.
  //
  //   ddp.join([&] {
  //     for (auto& batch : *loader) { … ddp.forward(batch.data) … backward(); optimizer.step(); }
  //   });
  //
  // Afterwards all ranks have the parameters and buffers of a rank whose loop was the longest. Optimizer states of the
  // others lack steps, unless JoinOptions::after_backward makes them. Ranks with data must call forward() and
  // backward() alike, and clear gradients in each step; there are two small collectives more per step. Not with
  // create_graph, nor with a SyncBatchNorm. Several DistributedDataParallels join together (JoinOptions::with). If
  // `body` or `after_backward` throws on a rank, the others throw Aborted when they would wait for it. Source: torch's
  // Join, DistributedDataParallel.join().
  void join(const std::function<void()>& body, JoinOptions options = {}) { replica_.join(body, std::move(options)); }

  // Training whose parameters do not depend on the number of ranks, to the bit: with DdpOptions::reproducible, the
  // global batch has a fixed number of shards. Each rank has some of them, which shards() lists.
  //
  //   muster::DistributedDataParallel ddp(net, {.reproducible = {.shards = 8}});
  //   std::map<int, Loader> loaders;  // by shard: DistributedSampler(size, {.num_replicas = 8, .rank = shard})
  //   auto loss = ddp.backward_by_shards(step, [&](int shard) {
  //     auto batch = loaders.at(shard).next();
  //     return cross_entropy(ddp->forward(batch.data), batch.target);
  //   });
  //   optimizer.step();
  //
  // It calls the function for each of this rank's shards, differentiates what it returns (a tensor with one element),
  // and averages gradients, buffers and losses over all shards in a fixed order. Returns the average loss. Gradients
  // are added to .grad. Hooks of users on .grad do not run, and neither does a communication hook.
  //
  // While the function runs, libtorch's default CPU generator has a seed made of options.seed, `step` and the shard; so
  // dropout is reproducible where each rank is a process. Buffers are at each shard what they were before the step, so
  // a BatchNorm normalises each shard by itself; its running statistics become the average of the shards'. Buffers of
  // integers are as after the last shard.
  //
  // A SyncBatchNorm, or what convert_sync_batchnorm() has converted, normalises the global batch. Then no shard can go
  // on without the others: the function runs in a thread of its own for each shard, one at a time, each until it meets
  // such a norm, and the graphs and gradients of all of this rank's shards live at the same time. It must call the same
  // of these norms for each shard, all of the module; hold no lock meanwhile; and leave alone what it has computed for
  // another shard.
  //
  // The machines must compute alike: the same libtorch on the same kind of processor. What the program computes between
  // this and the optimizer's step must not depend on the number of threads, as clip_grad_norm_() does: call
  // at::set_num_threads() with the same number for every number of ranks.
  //
  // InvalidArgument without DdpOptions::reproducible; if shards differ in the SyncBatchNorms that they call, or if one
  // of these is of another module, has another group, or meets a backward() with create_graph; if the function does not
  // return a tensor with one element that requires grad; if a buffer gets other memory, another shape or another dtype;
  // for parameters without a gradient, as backward(). What the function throws on one rank is an InvalidArgument on the
  // others. All ranks must call it with the same step.
  at::Tensor backward_by_shards(uint64_t step, const std::function<at::Tensor(int shard)>& loss) {
    return replica_.backward_by_shards(step, loss);
  }
  std::vector<int> shards() const { return replica_.shards(); }

  DdpLoggingData logging_data() const { return replica_.logging_data(); }

  const std::shared_ptr<ModuleType>& module() const { return module_; }
  ModuleType* operator->() { return module_.get(); }
  // For tests and diagnosis: which parameters share a bucket, in the order of reduction.
  std::vector<std::vector<std::string>> bucket_names() const { return replica_.bucket_names(); }

 private:
  friend class Joined;

  std::shared_ptr<ModuleType> module_;
  ddp::Replica replica_;
};

}  // namespace muster
