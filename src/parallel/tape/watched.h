// Tensors that tell before an operator uses them, and can name another that it is to use instead.
//
// C++ modules have no hooks around forward(). So a parameter whose values are not always here (fsdp/gatherer.h) must
// find out by itself when they are needed: its handles get a dispatch key that libtorch reserves for wrappers of this
// kind, and the function behind that key calls the tensor's `before_use`, then the operator as if nothing had happened.
// Views, and what operators save for backward, have the key too; results do not. `before_use` is not called for
// operators that read no values: views, zeros_like() and the like, and those that only call others. Memory that is read
// through a pointer is read unseen. A user's own operator that calls others and reads through pointers is to be
// registered for the dispatch key of its tensors' device (CPU, CUDA): then its parameters stay until it ends.
//
// In mixed precision, and if another device computes, an operator that reads a parameter gets its copy
// (compute_copy.h): the function behind the key puts what `instead` returns into the operator's arguments, also of
// views, so that their results have the copy's dtype and device.
//
// libtorch calls this key TESTING_ONLY_GenericWrapper, because none of its own parts uses it. Only this file does here.
//
// Thread-safety: watch(), a tensor in one thread at a time. before_use is called by each thread that uses the tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace muster::parallel {

// The tensor's storage has a before_use or an `instead` (shared_tensor.h). It may be called again, for example after
// set_data(), which takes the key away.
void watch(const at::Tensor& tensor);
bool is_watched(const at::Tensor& tensor);       // no longer when it has another storage
at::Tensor unwatched(const at::Tensor& tensor);  // the same memory, if it was watched: for its owner

// While it lives, operators in this thread use watched tensors as others: for an owner's update.
class [[nodiscard]] UnwatchedGuard {
 public:
  UnwatchedGuard();

 private:
  const c10::impl::ExcludeDispatchKeyGuard without_;
};

bool in_backward();  // whether autograd runs a backward() in this thread

}  // namespace muster::parallel
