// ZeroRedundancyOptimizer: any optimizer of torch::optim, whose states each rank keeps for its part of the parameters
// only.
//
//   muster::DistributedDataParallel ddp(net);
//   muster::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(net->parameters(),
//                                                                  torch::optim::AdamWOptions(1e-3));
//   for (…) {
//     optimizer.zero_grad();
//     loss_function(ddp.forward(x), y).backward();
//     optimizer.step();
//   }
//
// Each parameter has one owner among the ranks, so that all ranks own about the same number of bytes. step() is the
// step of the class that it is derived from, for this rank's own parameters; then each owner sends its new values to
// all. So N ranks keep the states once, and share the work of the step. All ranks get the same values to the bit, which
// are those that the class itself gives.
//
// It is an optimizer of its class in all else: groups with options of their own, add_param_group(), schedulers,
// GradScaler and StateOffload work as with the class. FullyShardedDataParallel needs none: each optimizer is sharded
// there.
//
// With step_in_backward(), the step is part of backward(): a bucket's parameters are updated, and sent, while the next
// bucket is averaged.
//
//   ddp.register_comm_hook(optimizer.step_in_backward());      // step() is called as before
//
// States: a muster::Snapshot stores each rank's own, and restores them on any number of ranks, also into the class
// itself, and the reverse. For torch::save(), consolidate() brings all states to one rank first; its archive is one of
// the class. torch::load() takes such an archive on every rank, and keeps this rank's part.
//
// The class must skip parameters without a gradient, as all of torch's do except LBFGS. A parameter that does not
// require a gradient stays as it is, also if it has one. All ranks call step() equally often: after a backward() that
// threw on one rank as well, and under ddp.join() as JoinOptions::after_backward.
//
// Errors: InvalidArgument for LBFGS, for parameters that are not dense or belong to FullyShardedDataParallel, and for
// save() on a rank that lacks states; Mismatch if ranks give different parameters, which names the first; those of
// broadcast. If the class's step() throws on one rank, that rank still sends its parameters, so that the ranks stay in
// order. Then step() throws there; it also throws what a step in backward() has thrown.
// Memory: besides its states, a copy of all parameters below 64 KiB. Thread-safety: one thread, as an optimizer.
// Source: torch.distributed.optim.ZeroRedundancyOptimizer; Rajbhandari et al., "ZeRO", SC 2020 (its first stage).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

#include "muster/comm/group.h"
#include "muster/parallel/comm_hook.h"
#include "muster/parallel/comm_hooks.h"

namespace muster {

struct ZeroRedundancyOptions {
  Group group;  // default: all ranks
};

// The part that does not depend on the optimizer's class.
class ShardedOptimizer {
 public:
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  // The World's rank that owns a parameter, which is one of this optimizer's. Collective if groups were added since the
  // last call or step().
  int owner(const at::Tensor& parameter);

  // Collective. Rank `to` of the group gets the states of all parameters, until its next step(). InvalidArgument if the
  // class is not one of torch's SGD, Adam, AdamW, RMSprop or Adagrad, or of optimizers.h.
  void consolidate(int to = 0);

  // A hook for DistributedDataParallel::register_comm_hook(). After `average`, which is a hook that averages over all
  // ranks, the bucket's parameters take their step. A parameter without a gradient on any rank counts as one with
  // zeros. Gradients cannot be clipped or unscaled before. The class's step() is called for each bucket, so it must not
  // count its calls. backward() throws InvalidArgument when the optimizer has ended.
  CommHook step_in_backward(CommHook average = comm_hooks::all_reduce);

  // For StateOffload and Snapshot: the class that the optimizer is derived from, and where its states are.
  const std::type_info& inner_class() const;
  const Group& group() const;
  // This rank's states only, and the options.
  virtual void save_part(torch::serialize::OutputArchive& archive) const = 0;

 protected:
  ShardedOptimizer(torch::optim::Optimizer& optimizer, const std::type_info& inner_class,
                   ZeroRedundancyOptions options);
  virtual ~ShardedOptimizer();
  void step_shared();
  void drop_states_of_others();
  void require_all_states() const;

 private:
  virtual void step_inner() = 0;

  struct Impl;
  std::shared_ptr<Impl> impl_;
};

template <std::derived_from<torch::optim::Optimizer> Inner>
class ZeroRedundancyOptimizer final : public Inner, public ShardedOptimizer {
 public:
  // Collective, as `Inner(parameters, defaults)`, and so for groups of parameters.
  template <typename Options>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, Options defaults, ZeroRedundancyOptions options = {})
      : Inner(std::move(parameters), std::move(defaults)), ShardedOptimizer(*this, typeid(Inner), std::move(options)) {}
  template <typename Options>
  ZeroRedundancyOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults,
                          ZeroRedundancyOptions options = {})
      : Inner(groups, std::move(defaults)), ShardedOptimizer(*this, typeid(Inner), std::move(options)) {}

  // Collective. The closure is called once.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode with_grad(true);
      loss = closure();
    }
    step_shared();
    return loss;
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    require_all_states();
    Inner::save(archive);
  }
  void save_part(torch::serialize::OutputArchive& archive) const override { Inner::save(archive); }
  void require_complete_states() const { require_all_states(); }  // for state_dict() of the classes of optimizers.h
  void load(torch::serialize::InputArchive& archive) override {
    Inner::load(archive);
    drop_states_of_others();
  }

 private:
  void step_inner() override { Inner::step(nullptr); }
};

}  // namespace muster
