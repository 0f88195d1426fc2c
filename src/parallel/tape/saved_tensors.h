// Who decides what becomes of the tensors that operators save for backward.
//
// libtorch asks its engine which hooks a saved tensor gets. So an engine of our own takes the place of libtorch's; it
// does nothing else (docs/decisions/0015). It asks the thread's Keeper.
//
// Thread-safety: all functions; a Keeper is its thread's.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>
#include <utility>

#include "base/auto_reset.h"

namespace muster::parallel {

class Keeper {
 public:
  virtual ~Keeper() = default;
  // For each tensor that an operator saves; null: the tensor is kept as always.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
};

// Keeps the tensor, and shows it once when it is saved. A graph may outlive what `show` refers to.
class Shown final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Shown(std::function<void(const at::Tensor&)> show) : show_(std::move(show)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = tensor.detach();
    show_(tensor_);
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  const std::function<void(const at::Tensor&)> show_;
  at::Tensor tensor_;
};

// From now on `keeper` decides in this thread; null: libtorch. Returns the one before. Call require_keepers() first.
Keeper* exchange_keeper(Keeper* keeper);
Keeper* current_keeper();

// While it lives, `keeper` decides.
class Keeping {
 public:
  explicit Keeping(Keeper* keeper);

 private:
  const AutoReset<Keeper*> set_;
};

// While it lives, an activation_checkpoint() computes again in this thread.
class InSecondCall {
 public:
  InSecondCall();

 private:
  const AutoReset<bool> set_;
};
bool in_second_call();

// Unavailable if another engine than libtorch's runs in this process.
void require_keepers();

}  // namespace muster::parallel
