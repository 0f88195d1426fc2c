// Differentiable optimizers of modules: after step(), the module's parameters are functions of the parameters before
// it, so that the gradient of a later loss flows back through the steps (meta-learning, learned hyper-parameters).
//
//   at::Tensor loss_after_adapting(const optim::ModuleState& state, const Task& task) {
//     Net net;
//     optim::recover_state_dict(*net, state);                  // the caller's tensors, with their graph
//     optim::MetaSGD inner(*net, {.lr = 0.01});
//     for (int i = 0; i < 5; ++i) inner.step(loss(net->forward(task.x), task.y));
//     return loss(net->forward(task.new_x), task.new_y);
//   }
//   loss_after_adapting(optim::extract_state_dict(*net), task).backward();   // net->parameters() get meta-gradients
//
// The same function may run on another worker: rpc::sync<&loss_after_adapting>("worker1", state, task).
//
// How a module gets new parameters. A module keeps a parameter in two places: in its dictionary (register_parameter)
// and in a member variable. step(), recover_state_dict() and functional_call() put the new tensors into both; nothing
// is copied, and what the graph has saved of earlier steps stays valid. They know the members of libtorch's own
// modules. A class of your own that registers parameters or buffers and keeps them in members derives from
// TensorMembers (tensor_members.h) too; if it does not, these functions throw InvalidArgument, which names the class
// and the parameter. Parameters that a module shares with another stay shared.
//
// Since the module has new tensors, an optimizer of the outer loop that was made of net->parameters() holds the old
// ones: give the module its own back with recover_state_dict(), or adapt another module, as above.
//
// Errors: InvalidArgument as above; Mismatch: a state of another module. Thread-safety: that of the module.
// Source: torchopt (MetaOptimizer, extract_state_dict, recover_state_dict, module_clone, stop_gradient), torch.func
// (functional_call).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "muster/optim/tensor_members.h"
#include "muster/optim/transform.h"
#include "muster/rpc/modules.h"

namespace muster::optim {

// kReference: the tensors themselves. kCopy: copies, through which gradients flow to the originals. kDeepCopy: copies
// that know nothing of the originals.
enum class CopyMode { kReference, kCopy, kDeepCopy };

// A module's tensors by their names. Also made from a rpc::ModuleState.
struct ModuleState : rpc::ModuleState {
  bool detach_buffers = false;  // whether whoever recovers this state gets buffers of their own

  ModuleState() = default;
  ModuleState(rpc::ModuleState state, bool detach = false)
      : rpc::ModuleState(std::move(state)), detach_buffers(detach) {}
  MSGPACK_DEFINE(MSGPACK_BASE(rpc::ModuleState), detach_buffers);
};

struct ExtractOptions {
  CopyMode by = CopyMode::kReference;
  bool with_buffers = true;
  bool detach_buffers = false;  // copies the buffers, here and in recover_state_dict(): batch norm overwrites them
  std::optional<at::Device> device = {};  // default: where they are
};
ModuleState extract_state_dict(const torch::nn::Module& module, ExtractOptions options = {});

// Gives the module these tensors, not their values: their graph and the memory come along. A state without buffers
// leaves the module its own. The module stays in its mode (train(), eval()).
void recover_state_dict(torch::nn::Module& module, const ModuleState& state);

// Cuts the graph: replaces the tensors by others with the same memory that do not know where they come from. Parameters
// still require grad if they did.
void stop_gradient(torch::nn::Module& module);
void stop_gradient(ModuleState& state);
void stop_gradient(OptState& state);

OptState copy_state(const OptState& state, CopyMode by, std::optional<at::Device> device = {});

// Calls fn() while the module has these parameters and buffers (those that are not named keep their own), and returns
// its result.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
template <typename Fn>
auto functional_call(torch::nn::Module& module, const NamedTensors& tensors, Fn&& fn);

namespace detail {

// All places in which a module and its sub-modules keep their tensors.
class ModuleSlots {
 public:
  struct Slot {
    std::string name;
    bool is_buffer;
    std::vector<at::Tensor*> places;  // the dictionary's first; of all modules that share it
    const at::Tensor& get() const { return *places.front(); }
    void set(const at::Tensor& tensor) const {
      for (at::Tensor* const place : places) *place = tensor;
    }
  };

  explicit ModuleSlots(torch::nn::Module& module);
  const std::vector<Slot>& all() const { return slots_; }
  const Slot* find(const std::string& name) const;  // any of its names, if it is shared

 private:
  std::vector<Slot> slots_;
  std::unordered_map<std::string, size_t> names_;
};

// Puts tensors into places, which hold one tensor together, until it is destroyed.
class Lent {
 public:
  Lent() = default;
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  ~Lent();
  void put(const std::vector<at::Tensor*>& places, const at::Tensor& tensor);

 private:
  std::vector<std::pair<std::vector<at::Tensor*>, at::Tensor>> before_;
};

// Puts the named tensors into the module until it is destroyed.
class Swapped {
 public:
  Swapped(torch::nn::Module& module, const NamedTensors& tensors);

 private:
  Lent lent_;
};

template <typename M>
torch::nn::Module& as_module(M& module) {
  if constexpr (std::derived_from<M, torch::nn::Module>) {
    return module;
  } else {
    return *module;
  }
}

std::shared_ptr<torch::nn::Module> clone_module(const torch::nn::Module& module, ExtractOptions options);

}  // namespace detail

template <typename Fn>
auto functional_call(torch::nn::Module& module, const NamedTensors& tensors, Fn&& fn) {
  const detail::Swapped swapped(module, tensors);
  return std::forward<Fn>(fn)();
}

// A module of the same class with the same tensors, or copies of them. The class must have clone()
// (torch::nn::Cloneable); c10::Error otherwise. The random numbers that clone() draws are drawn again.
template <std::derived_from<torch::nn::Module> M>
std::shared_ptr<M> module_clone(const M& module, ExtractOptions options = {}) {
  return std::static_pointer_cast<M>(detail::clone_module(module, options));
}
template <typename M>
torch::nn::ModuleHolder<M> module_clone(const torch::nn::ModuleHolder<M>& holder, ExtractOptions options = {}) {
  return torch::nn::ModuleHolder<M>(module_clone(*holder, options));
}

// A differentiable optimizer of a module, from any transformation of its gradients. The module must outlive it, and
// must not get other sub-modules or parameters meanwhile.
class MetaOptimizer {
 public:
  MetaOptimizer(torch::nn::Module& module, GradientTransformation transformation);

  // Differentiates the loss, a scalar, with respect to the module's parameters, and gives the module the updated ones.
  // Parameters that the loss does not depend on, and those that do not require grad, stay. After an error everything is
  // as it was.
  void step(const at::Tensor& loss);

  // Adds another module, with a state of its own.
  void add_param_group(torch::nn::Module& module);

  // One state per module, empty before its first step: keeps and restores them across inner loops.
  std::vector<OptState> state_dict() const;
  void load_state_dict(const std::vector<OptState>& states);
  std::vector<OptState> extract_state_dict(CopyMode by = CopyMode::kReference,
                                           std::optional<at::Device> device = {}) const;
  void stop_gradient();

 private:
  struct Part {
    detail::ModuleSlots slots;
    OptState state;
    bool begun = false;
  };
  GradientTransformation transformation_;
  std::vector<Part> parts_;
};

// Where TorchOpt's classes have other defaults than its functions.
struct MetaAdaDeltaOptions {
  Rate lr = 1.0;
  double rho = 0.9, eps = 1e-6, weight_decay = 0;
  bool moment_requires_grad = false, maximize = false;
  operator FuncAdadeltaOptions() const { return {lr, rho, eps, weight_decay, moment_requires_grad, maximize}; }
};
struct MetaAdaMaxOptions {
  Rate lr = 2e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8, weight_decay = 0;
  bool moment_requires_grad = false, maximize = false;
  operator FuncAdamaxOptions() const { return {lr, betas, eps, weight_decay, moment_requires_grad, maximize}; }
};
struct MetaRAdamOptions {
  Rate lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8, weight_decay = 0;
  bool moment_requires_grad = false, maximize = false;
  operator FuncRAdamOptions() const { return {lr, betas, eps, weight_decay, moment_requires_grad, maximize}; }
};

class MetaSGD : public MetaOptimizer {  // without a default rate
 public:
  MetaSGD(torch::nn::Module& module, FuncSGDOptions options) : MetaOptimizer(module, sgd(std::move(options))) {}
};
#define MUSTER_META_OPTIMIZER(NAME, OPTIONS, FUNCTION)                  \
  class NAME : public MetaOptimizer {                                   \
   public:                                                              \
    explicit NAME(torch::nn::Module& module, OPTIONS options = {})      \
        : MetaOptimizer(module, optim::FUNCTION(std::move(options))) {} \
  }
MUSTER_META_OPTIMIZER(MetaAdam, FuncAdamOptions, adam);
MUSTER_META_OPTIMIZER(MetaAdamW, FuncAdamWOptions, adamw);
MUSTER_META_OPTIMIZER(MetaAdaGrad, FuncAdagradOptions, adagrad);
MUSTER_META_OPTIMIZER(MetaRMSProp, FuncRMSpropOptions, rmsprop);
MUSTER_META_OPTIMIZER(MetaAdaDelta, MetaAdaDeltaOptions, adadelta);
MUSTER_META_OPTIMIZER(MetaAdaMax, MetaAdaMaxOptions, adamax);
MUSTER_META_OPTIMIZER(MetaRAdam, MetaRAdamOptions, radam);
#undef MUSTER_META_OPTIMIZER

}  // namespace muster::optim
