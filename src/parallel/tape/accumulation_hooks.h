// Hooks around the accumulation of a parameter's gradient, which their owner can take away again.
//
// Thread-safety: none; not while a backward() runs.
#pragma once

#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace muster::parallel {

// Called by autograd when a parameter's gradient has been accumulated.
class ReadyHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  using Pointer = std::unique_ptr<PostAccumulateGradHook>;

  ReadyHook(const void* owner, std::function<void()> on_ready, Pointer before)
      : owner_(owner), on_ready_(std::move(on_ready)), before_(std::move(before)) {}
  void operator()(const torch::autograd::Variable& tensor) override {
    if (before_) (*before_)(tensor);
    on_ready_();
  }

  // Whether there is a hook of another owner in the chain that `head` begins.
  static bool has_other(const Pointer& head, const void* owner) {
    const auto* const hook = dynamic_cast<const ReadyHook*>(head.get());
    return hook && (hook->owner_ != owner || has_other(hook->before_, owner));
  }

  // Takes the owner's hook out of the chain that `head` begins; others' stay.
  static void remove(Pointer& head, const void* owner) {
    auto* const hook = dynamic_cast<ReadyHook*>(head.get());
    if (!hook) return;
    if (hook->owner_ == owner)
      head = std::exchange(hook->before_, nullptr);
    else
      remove(hook->before_, owner);
  }

 private:
  const void* const owner_;
  const std::function<void()> on_ready_;
  Pointer before_;  // the user's own, or another reducer's
};

// Called by autograd before a parameter's gradient is accumulated.
class BeginHook final : public torch::autograd::FunctionPreHook {
 public:
  BeginHook(const void* owner, std::function<void()> on_begin) : owner_(owner), on_begin_(std::move(on_begin)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    on_begin_();
    return gradients;
  }

  static void remove(std::vector<std::unique_ptr<FunctionPreHook>>& hooks, const void* owner) {
    std::erase_if(hooks, [&](const auto& hook) {
      const auto* const ours = dynamic_cast<const BeginHook*>(hook.get());
      return ours && ours->owner_ == owner;
    });
  }

 private:
  const void* const owner_;
  const std::function<void()> on_begin_;
};

}  // namespace muster::parallel
