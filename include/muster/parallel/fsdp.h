// FullyShardedDataParallel: every rank has a part of each batch, and the ranks of a host have one model together.
//
//   auto model = muster::fully_shard(net);
//   torch::optim::AdamW optimizer(net->parameters(), 1e-4);    // any optimizer, made before or after
//   loss_function(model.forward(x), y).backward();
//   optimizer.step();                                          // each rank updates the parameters that it owns
//
// The parameters lie once in memory that all ranks of the host share, instead of once per rank. Each parameter has an
// *owner* on each host (but see kFullShard below); parameters are divided evenly. backward() averages each gradient to
// its owners; on the other ranks .grad is undefined afterwards. torch::optim's optimizers skip such parameters, so
// gradients, optimizer states and the work of step() are divided among the ranks without the optimizer's knowledge. On
// one host no parameter is gathered: every operator of forward() sees plain tensors.
//
// The constructor copies rank 0's parameters and buffers to all ranks, or fills those that have no values by
// FsdpOptions::init, for models that no process could make. The tensors of the module stay the same objects;
// their memory changes, for good. Every rank calls forward(), backward() and step() equally often. The rules:
//   - A step is forward(), backward(), step(), with as many forward() calls as you like, and with no_sync() as in
//     DistributedDataParallel. step() comes after a backward(). The next forward() waits until all ranks' step() is
//     over; until then nobody may read parameters in any other way. In eval() mode some ranks may call forward() more
//     often than others, but each calls it at least once after a step(), or gather() before.
//   - A gradient that backward() has left is an average. Change it in place. What you put into .grad yourself before a
//     backward() counts as this rank's own. Before no_sync(), and before another FullyShardedDataParallel of the module
//     is made, call zero_grad(), which leaves no zeros.
//   - If a backward() throws on a rank, and the rank goes on, all ranks call zero_grad() and leave step() out. If it
//     throws before the first parameter has its gradient, the other ranks wait for this one, until their timeout.
//   - Only the owner changes a parameter; owned_parameters() has what this rank owns. What does more than step() by the
//     optimizer (weight clipping, an average that is written back) goes over these.
//   - If you change parameters on one host, make the same change on every host.
//   - Whatever else reads or changes parameters stands between two calls of synchronize() by all ranks: one rank alone
//     evaluates module() or saves it, or the owners change their parameters.
//   - The last backward() before step() is one that averages. If it is autograd::grad(), or in no_sync(), other ranks
//     may still be in theirs: call synchronize() before step().
//   - torch::load() into the module, on every rank, works; the next forward() shares the new values, and is one that
//     all ranks call. In mixed precision or with a compute_device, call synchronize() before if forward() was the last.
//   - Which parameters require grad, and which there are, is settled when this object is made; freezing is allowed with
//     find_unused_parameters. No other FullyShardedDataParallel or DistributedDataParallel of the same parameters may
//     live while it trains.
//   - Gradients of other ranks' parameters do not exist: use clip_grad_norm_() below for the norm of all. Adagrad makes
//     states when it is constructed: give it owned_parameters(). LBFGS changes all parameters, and cannot be used.
//   - backward() with create_graph throws InvalidArgument: an average on its owner has no graph. For gradients of
//     gradients, call autograd::grad() with create_graph, and backward() of what you make of its results.
//   - A process that fork()s shares the parameters with its child.
// forward() throws InvalidArgument when it finds one of the rules broken, and names the parameter. It cannot find
// everything: what is written through Tensor::data() only on the parameter's owner, and then only if others might have
// been reading. Whether hosts have the same values it finds by some of each parameter's bytes.
//
// Results: all ranks of a host read the same parameters. Hosts have equal parameters, and these equal those of
// DistributedDataParallel.
// If a rank dies in step(), some parameters are updated and others not. A Snapshot (snapshot.h) with the module and the
// optimizer resumes the training to the bit; make it after the FullyShardedDataParallel.
//
// Several hosts: with ShardingStrategy::kHybridShard, the default, each has one copy of the parameters, gradients and
// states, divided among its ranks; with unequal numbers of ranks, among as many as the host with the fewest has. With
// kFullShard, all hosts have one copy together, for models that do not fit a host, or networks that are fast:
//   - A parameter has one owner among all ranks. Before an operator of forward() or backward() uses a parameter, its
//     *unit* is gathered: each host receives what the others own of it, once, and the unit that came next in the step
//     before is on its way already. A few units are on a host together.
//   - So all ranks use the parameters in the same order and call forward() equally often, in eval() mode too; otherwise
//     they get a Mismatch, or a TimeoutError. A rank that throws in a step leaves the others waiting until their
//     timeout, or until it ends.
//   - Between backward() and the next forward(), each host has the values of its own parameters only. Whoever reads
//     others (torch::save(), evaluation of unequal parts in eval() mode) calls gather() before, on all ranks, and
//     synchronize() afterwards. An operator that reads a parameter that is not there throws InvalidArgument; a pointer
//     to it must not be used (SIGSEGV). That is true of Muster's own functions as well: all_reduce() of a parameter
//     needs gather().
//   - A backward() may follow another one, over other graphs or again over one; it gathers again. Call synchronize()
//     before this object is destroyed, if an evaluation was the last.
//
// Mixed precision (FsdpOptions::mixed_precision): mixed_precision.h says what operators compute with.
//
// A model that does not fit the device that computes (FsdpOptions::compute_device, for example torch::kCUDA):
// parameters, gradients and the optimizer's states stay in the host's memory, and step() is the CPU's work. Make the
// module on the CPU, and leave it there. Inputs of forward() are on the device, as its results are:
//   - An operator of forward() or backward() that reads a parameter gets its values on the device instead. A *unit* of
//     parameters is copied there when it is needed, the next one meanwhile; at most max_gathered_units are there
//     together. So the device has activations, these units and some gradients. `weight.device()` is the CPU.
//   - Each gradient goes to the CPU while backward() goes on, and is averaged there.
//   - Buffers move to the device, for good. So a module with buffers cannot be evaluated by itself, only by
//     model.forward().
//   - A hook of a parameter runs on the CPU, and has the parameter there; with kFullShard it may not read parameters.
//   - Ranks may use the same device, if they are processes, or different ones. Rules, results and errors are the same
//     as without it, mixed precision included (which halves what is copied); c10::OutOfMemoryError if the device has
//     too little memory.
//
// Large parameters. The owner of a parameter has all of its gradient and state. If one is too large to be balanced by
// the others (an embedding), divide_above_mb divides it by rows (slices of its outermost dimension), with an owner
// each:
//   - Give the optimizer model.parameters(), which has the rows instead of the parameter. They are tensors on the
//     parameter's memory: what changes one changes the other. An optimizer over net->parameters() does not train it.
//   - backward() leaves gradients in the rows, on their owners; the parameter itself has none. Do not put any there.
//   - Call zero_grad() of the optimizer; after a backward() in no_sync() whose gradients are not wanted, of the module,
//     too.
//   - Optimizers whose update of an element depends on the whole parameter (Muon, LAMB, Adafactor) take each range of
//     rows for a parameter of its own.
//   - How a parameter is divided does not depend on the number of ranks, so a snapshot can be restored on another.
//
// Limits: dense parameters on the CPU; the model, with its gradients and states, fits each host, or with kFullShard all
// hosts together.
//
// Errors: as DistributedDataParallel, and Unavailable if a host has not enough memory. Thread-safety: one thread, as
// an nn::Module. Source: torch.distributed.fsdp.fully_shard; Rajbhandari et al., "ZeRO: Memory Optimizations Toward
// Training Trillion Parameter Models", SC 2020; Zhao et al., "PyTorch FSDP", VLDB 2023.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/comm/group.h"
#include "muster/parallel/mixed_precision.h"
#include "muster/parallel/no_sync.h"

namespace muster {

enum class ShardingStrategy {
  kHybridShard,  // each host has one copy of the parameters, divided among its ranks
  kFullShard,    // all hosts have one copy together; on one host, the same
};

struct FsdpOptions {
  Group group;                     // default: all ranks
  double bucket_cap_mb = 25;       // MiB; a bucket of small gradients is closed before it exceeds this
  double first_bucket_cap_mb = 1;  // the first bucket is smaller, so that communication starts early
  bool find_unused_parameters = false;
  bool broadcast_buffers = true;  // rank 0's buffers to all before each forward in training mode
  bool replace_allocator = true;  // as DdpOptions::replace_allocator
  ShardingStrategy strategy = ShardingStrategy::kHybridShard;

  // Fills parameters and buffers that have no values (on_meta.h), by name: a parameter on its owners, a buffer on every
  // rank. The generator depends on the name and on init_seed only, so that the values do not depend on the number of
  // ranks, if the function depends on nothing else. It may read them from a file. Each rank then has memory for what it
  // owns.
  std::function<void(const std::string& name, at::Tensor values, at::Generator random)> init;
  uint64_t init_seed = 0;

  MixedPrecision mixed_precision;

  // Parameters larger than this are divided into rows that different ranks own ("Large parameters", above); not with
  // kFullShard over several hosts. MiB, in the parameter's own dtype; at least 1. The default divides none.
  double divide_above_mb = std::numeric_limits<double>::infinity();

  // The device on which forward() and backward() compute, if it is not the CPU ("CPU offload", above).
  std::optional<at::Device> compute_device;

  // For kFullShard over several hosts, and for a compute_device. Units are what is gathered together: the parameters of
  // each module for which is_unit is true (as dynamic_cast<const Block*>(&module) != nullptr), and the others in their
  // order, up to unit_cap_mb.
  std::function<bool(const torch::nn::Module&)> is_unit;
  double unit_cap_mb = 25;            // MiB, in the parameters' own dtype
  size_t max_gathered_units = 3;      // on a host or a device, with the one that is being received; at least 2
  bool reshard_after_forward = true;  // false: gathered units stay until the end of backward()
};

namespace fsdp {

// The part that does not depend on the module's type.
class Sharder {
 public:
  Sharder(std::shared_ptr<torch::nn::Module> module, FsdpOptions options);
  Sharder(const Sharder&) = delete;
  Sharder& operator=(const Sharder&) = delete;
  ~Sharder();

  // As long as the result lives, operators compute in mixed precision.
  [[nodiscard]] std::shared_ptr<void> before_forward();
  std::optional<at::ScalarType> input_dtype() const;
  std::optional<at::ScalarType> output_dtype() const;
  void synchronize();
  void gather();
  bool set_sync(bool on);  // returns the previous value
  int owner(const at::Tensor& parameter) const;
  std::vector<at::Tensor> parameters() const;
  std::vector<at::Tensor> owned_parameters() const;
  double clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite);
  std::vector<std::vector<std::string>> bucket_names() const;
  std::vector<std::vector<std::string>> unit_names() const;
  std::vector<size_t> units_here() const;
  size_t bytes_here() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp

template <typename ModuleType>
class FullyShardedDataParallel {
 public:
  explicit FullyShardedDataParallel(std::shared_ptr<ModuleType> module, FsdpOptions options = {})
      : module_(std::move(module)), sharder_(std::make_unique<fsdp::Sharder>(module_, std::move(options))) {}
  explicit FullyShardedDataParallel(const torch::nn::ModuleHolder<ModuleType>& holder, FsdpOptions options = {})
      : FullyShardedDataParallel(holder.ptr(), std::move(options)) {}

  template <typename... Arguments>
  auto forward(Arguments&&... arguments) {
    const auto in_forward = sharder_->before_forward();
    return parallel::with_output_dtype(
        sharder_->output_dtype(), [&](auto&&... inputs) { return module_->forward(inputs.get()...); },
        parallel::Input<Arguments>(std::forward<Arguments>(arguments), sharder_->input_dtype())...);
  }
  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  // While the guard lives, backward() only accumulates, without communication, and .grad is this rank's own on every
  // rank. The first backward() after it averages the sum.
  using NoSync = NoSyncGuard<fsdp::Sharder>;
  [[nodiscard]] NoSync no_sync() { return NoSync(*sharder_); }

  // The same without a guard, until it is switched on again. Source: FSDPModule.set_requires_gradient_sync.
  void set_requires_gradient_sync(bool on) { sharder_->set_sync(on); }

  // Every rank calls it; returns when all have: what they have read and changed so far is over.
  void synchronize() { sharder_->synchronize(); }

  // As synchronize(); then this host has the values of all parameters, which must not change meanwhile, until the next
  // synchronize(), forward() in training mode, or end of a backward() that averages. Until then each rank may call
  // forward() in eval() mode as often as it likes, or never. Unavailable, on every rank, if a host has too little
  // memory.
  void gather() { sharder_->gather(); }

  // The rank in the group that owns a parameter of the module; if each host has an owner, that on this rank's host.
  // InvalidArgument if it is not one, or is divided into rows.
  int owner(const at::Tensor& parameter) const { return sharder_->owner(parameter); }
  // Those of the module, each once, in its order; with the rows of a parameter that divide_above_mb divides instead of
  // the parameter. The same on all ranks.
  std::vector<at::Tensor> parameters() const { return sharder_->parameters(); }
  std::vector<at::Tensor> owned_parameters() const { return sharder_->owned_parameters(); }

  // Every rank calls it after backward(). Scales all gradients so that their norm, over all parameters of the module,
  // is at most max_norm; returns what it was before, the same on all ranks. norm_type: 1, 2, … or infinity. As in
  // PyTorch, a norm of NaN makes all gradients NaN, and an infinite one makes them 0 or NaN; with error_if_nonfinite,
  // both throw InvalidArgument on every rank. Source: torch::nn::utils::clip_grad_norm_.
  double clip_grad_norm_(double max_norm, double norm_type = 2, bool error_if_nonfinite = false) {
    return sharder_->clip_grad_norm(max_norm, norm_type, error_if_nonfinite);
  }

  const std::shared_ptr<ModuleType>& module() const { return module_; }
  ModuleType* operator->() { return module_.get(); }
  // For tests and diagnosis: which parameters share a bucket, in the order of reduction.
  std::vector<std::vector<std::string>> bucket_names() const { return sharder_->bucket_names(); }
  // The same for units, if parameters are gathered or copied to a device; the numbers of those that are on this host
  // (on the compute_device) now or on their way to it; and the bytes of parameters in this rank's memory now.
  std::vector<std::vector<std::string>> unit_names() const { return sharder_->unit_names(); }
  std::vector<size_t> units_here() const { return sharder_->units_here(); }
  size_t bytes_here() const { return sharder_->bytes_here(); }

 private:
  std::shared_ptr<ModuleType> module_;
  std::unique_ptr<fsdp::Sharder> sharder_;
};

template <typename ModuleType>
FullyShardedDataParallel<ModuleType> fully_shard(std::shared_ptr<ModuleType> module, FsdpOptions options = {}) {
  return FullyShardedDataParallel<ModuleType>(std::move(module), std::move(options));
}
template <typename ModuleType>
FullyShardedDataParallel<ModuleType> fully_shard(const torch::nn::ModuleHolder<ModuleType>& holder,
                                                 FsdpOptions options = {}) {
  return FullyShardedDataParallel<ModuleType>(holder, std::move(options));
}

}  // namespace muster
