// Brings every operator to a function of ours: the one behind a dispatch key for which no part of libtorch registers
// anything. Where a tensor or the thread has this key, libtorch calls the function in place of the operator.
//
// Thread-safety: all functions.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

namespace muster::parallel {

// In this process. A key can have one function.
template <c10::DispatchKey key, c10::BoxedKernel::BoxedKernelFunction_withDispatchKeys* function>
void bring_every_operator_to() {
  static const torch::Library library = [] {
    torch::Library all(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
    all.fallback(torch::CppFunction::makeFromBoxedFunction<function>());
    return all;
  }();
}

// Goes on with the operator as if `key` were not there.
inline void go_on_after(c10::DispatchKey key, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key), stack);
}

// Whether the operator changes this argument in place.
inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

}  // namespace muster::parallel
