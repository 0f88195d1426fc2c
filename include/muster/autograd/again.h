// A remote call that is done again when its worker is lost before it has answered the call's backward.
//
// The worker's part of the graph is lost with it. If the function depends on nothing but its arguments, another worker
// makes the same part again, from the same arguments, and backward goes on there. remote_call.h uses this for its parts
// (.max_retries).
//
// Thread-safety: all functions; `again` may be called in a thread of libtorch's engine, and must not wait.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "muster/rpc/future.h"

namespace muster::autograd {

// `results`: tensors of the result of one remote call, as it returned them. If none of them requires grad, this does
// nothing, and `again` is destroyed. Otherwise the graph holds `again` until it is used up. again() does the same call
// on a living worker, in grad mode, and returns the tensors of its result; an empty future says that it does not.
//
// A backward that needs it throws what again() or its future throws; InvalidArgument if the second result depends on
// other arguments than the first.
void call_again_if_lost(const std::vector<at::Tensor>& results,
                        std::function<rpc::Future<std::vector<at::Tensor>>()> again);

}  // namespace muster::autograd
