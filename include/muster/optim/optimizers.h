// Optimizers for training loops: those of Python's torch.optim, as torch::optim::Optimizer.
//
//   muster::AdamW adamw(net->parameters(), {.lr = 1e-3, .weight_decay = 0.1});
//   …
//   adamw.zero_grad();
//   loss.backward();
//   adamw.step();
//
// libtorch has six optimizers of its own, whose steps go through memory several times. These here call libtorch's fused
// kernels (SGD, Adagrad, Adam, AdamW of dense parameters on the CPU or a CUDA device), as fused=True does in Python.
// The others are Adadelta, Adamax, NAdam, RAdam, ASGD, RMSprop, Rprop, Adafactor and Muon. Arithmetic, names and
// defaults of the options are those of Python. They are the functional optimizers of functional_optimizer.h, which
// DistributedOptimizer uses as well. LBFGS, which calls a closure several times per step, is in lbfgs.h.
//
// Everything that takes a torch::optim::Optimizer takes them: libtorch's schedulers, GradScaler, Snapshot,
// StateOffload, ZeroRedundancyOptimizer<muster::AdamW>, FullyShardedDataParallel.
//
// Groups of parameters with options of their own:
//
//   muster::AdamW adamw({muster::AdamW::group(body, {.lr = 1e-4}), muster::AdamW::group(head, {.lr = 1e-3})});
//   adamw.options(1).weight_decay = 0;
//
// Options may change at any time between steps. A state begins with a parameter's first gradient.
//
// save() and load() have the archives of libtorch's optimizers; a load() that throws changes nothing. state_dict() has
// Python's names, for safetensors files that Python reads and writes (docs/optim.md has the lines).
//
// Your own: TorchOptimizer<O> of a class O that is derived from FunctionalOptimizer. As those of
// functional_optimizer.h, it has a default constructor, options(), and O::Options with a field lr and a list of its
// fields.
//
// Errors: InvalidArgument for options out of their range (from step(), if they were changed; then a rate may be below
// 0) and for sparse gradients that are not accepted, before anything has changed. Thread-safety: none; one thread, as
// torch::optim::Optimizer.
// Source: torch.optim.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/optim/functional_optimizer.h"
#include "muster/optim/lbfgs.h"
#include "muster/optim/param_group_options.h"

namespace muster {
namespace optim {

// What is kept for a parameter.
class KeptState : public torch::optim::OptimizerParamState {
 public:
  ParameterState values;
  virtual const std::vector<std::string>& names() const = 0;  // of values.kept
  virtual at::Tensor empty_kept(size_t index, const at::Tensor& parameter) const = 0;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

template <typename O>
class KeptStateOf final : public KeptState {
 public:
  const std::vector<std::string>& names() const override {
    static const std::vector<std::string> all = O().state_names();
    return all;
  }
  at::Tensor empty_kept(size_t index, const at::Tensor& parameter) const override {
    const O optimizer;
    return static_cast<const FunctionalOptimizer&>(optimizer).empty_kept(index, parameter);
  }
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<KeptStateOf>(*this);
  }
};

}  // namespace optim

// What the optimizers below have in common.
class TorchOptimizerBase : public torch::optim::Optimizer {
 public:
  // The closure is called once, with gradients enabled, and its loss is returned.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Numbers and tensors by Python's names: "state.0.step", "state.0.exp_avg", "param_groups.0.lr"; pairs and arrays
  // have one dimension. Parameters are counted over all groups. The tensors are copies. Of a ZeroRedundancyOptimizer,
  // consolidate() first; with FullyShardedDataParallel a rank has the states of the parameters that it owns.
  std::map<std::string, at::Tensor> state_dict() const;
  // InvalidArgument, before anything has changed: a name that this optimizer does not have, a tensor of another shape.
  // Numbers of param_groups may be missing, and those that only Python has may be there (of its schedulers, and what
  // chooses its kernels); states that are missing are forgotten.
  void load_state_dict(const std::map<std::string, at::Tensor>& state);

  // For a class that is derived from this one: throws if this rank does not have all states.
  virtual void require_complete_states() const {}

  // In all groups: `momentum`, or the first of `betas`. False if the options have neither.
  bool set_momentum(double momentum);

 protected:
  using torch::optim::Optimizer::Optimizer;
  // `read` reads an archive, which takes the place of all states. If it throws, or if a state does not fit its
  // parameter (InvalidArgument), nothing has changed.
  void load_with(const std::function<void()>& read);
  [[noreturn]] static void throw_other_options();
  void require_new(const std::vector<at::Tensor>& parameters) const;  // in no group
  // Gets each option, by name, and returns what it becomes.
  using Exchange = std::function<std::vector<double>(const char* name, std::vector<double> value)>;

 private:
  void check_loaded();
  virtual std::unique_ptr<optim::FunctionalOptimizer> functional(
      const torch::optim::OptimizerOptions& options) const = 0;
  virtual std::unique_ptr<optim::KeptState> new_state() const = 0;
  virtual void exchange_options(torch::optim::OptimizerOptions& options, const Exchange& exchange) const = 0;
};

template <typename O>
class TorchOptimizer : public TorchOptimizerBase {
 public:
  using Options = typename O::Options;
  using OptionsOfGroup = optim::ParamGroupOptions<Options>;

  explicit TorchOptimizer(std::vector<at::Tensor> parameters, Options options = {})
      : TorchOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(options)) {}
  // Groups without options of their own get these.
  explicit TorchOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options options = {})
      : TorchOptimizerBase(std::vector<torch::optim::OptimizerParamGroup>(),
                           std::make_unique<OptionsOfGroup>(O(std::move(options)).options())) {
    for (const auto& group : groups) add_param_group(group);
  }

  // A parameter that is in the group twice, as Module::parameters() has one that modules share, counts once.
  // InvalidArgument if it is in another group, or for options of another class. Hides libtorch's, which replaces
  // options of classes that it does not know by the optimizer's.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    const bool has_options = group.has_options();
    if (has_options && !dynamic_cast<const OptionsOfGroup*>(&group.options())) throw_other_options();
    require_new(group.params());
    TorchOptimizerBase::add_param_group(group);
    if (has_options) param_groups_.back().set_options(group.options().clone());
  }
  static torch::optim::OptimizerParamGroup group(std::vector<at::Tensor> parameters, Options options) {
    return {std::move(parameters), std::make_unique<OptionsOfGroup>(std::move(options))};
  }
  Options& options(size_t group = 0) { return static_cast<OptionsOfGroup&>(param_groups_.at(group).options()).values; }

  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<optim::KeptStateOf<O>, OptionsOfGroup>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    load_with([&] { torch::optim::serialize<optim::KeptStateOf<O>, OptionsOfGroup>(archive, *this); });
  }

 private:
  std::unique_ptr<optim::FunctionalOptimizer> functional(const torch::optim::OptimizerOptions& options) const override {
    typename O::Options values = static_cast<const OptionsOfGroup&>(options).values;
    // The constructor refuses a rate below 0, which a linear OneCycleLR has after its last step.
    const double lr = values.lr;
    const bool is_below = lr < 0 && std::isfinite(lr);
    if (is_below) values.lr = 0;
    auto optimizer = std::make_unique<O>(std::move(values));
    if (is_below) optimizer->set_scheduled_lr(lr);
    return optimizer;
  }
  std::unique_ptr<optim::KeptState> new_state() const override { return std::make_unique<optim::KeptStateOf<O>>(); }
  void exchange_options(torch::optim::OptimizerOptions& options, const Exchange& exchange) const override {
    optim::detail::for_each_option(
        static_cast<OptionsOfGroup&>(options).values,
        [&](const char* name, const std::vector<double>& now, const auto& set) { set(exchange(name, now)); });
  }
};

using SGD = TorchOptimizer<optim::SGD>;
using ASGD = TorchOptimizer<optim::ASGD>;
using Adagrad = TorchOptimizer<optim::Adagrad>;
using Adadelta = TorchOptimizer<optim::Adadelta>;
using Adafactor = TorchOptimizer<optim::Adafactor>;
using Adam = TorchOptimizer<optim::Adam>;
using AdamW = TorchOptimizer<optim::AdamW>;
using Adamax = TorchOptimizer<optim::Adamax>;
using Muon = TorchOptimizer<optim::Muon>;
using NAdam = TorchOptimizer<optim::NAdam>;
using RAdam = TorchOptimizer<optim::RAdam>;
using RMSprop = TorchOptimizer<optim::RMSprop>;
using Rprop = TorchOptimizer<optim::Rprop>;

namespace optim::detail {
template <typename... O>
struct Optimizers {
  template <typename Fn>
  static void for_each(const Fn& fn) {
    (fn(std::type_identity<O>()), ...);
  }
};
}  // namespace optim::detail
// All of them, for code that must know each: AllOptimizers::for_each([]<typename O>(std::type_identity<O>) { … }).
using AllOptimizers = optim::detail::Optimizers<SGD, ASGD, Adagrad, Adadelta, Adafactor, Adam, AdamW, Adamax, Muon,
                                                NAdam, RAdam, RMSprop, Rprop>;

}  // namespace muster
