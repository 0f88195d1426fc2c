// The nccl backend: libtorch's ProcessGroupNCCL behind Muster's interface, for CUDA tensors. Compiled only if libtorch
// has CUDA and NCCL.
//
// Works are NCCL's own. As usual in PyTorch, run() and Work::wait() do not block the calling thread until the operation
// is complete: they make the current CUDA stream wait for it. To block the thread, call torch::cuda::synchronize().
//
// Operations that NCCL does not have (bitwise reductions, unequal parts in lists for reduce_scatter, sparse tensors,
// receives from any source) throw InvalidArgument.
#pragma once

#include "comm/core/backend.h"
#include "comm/core/backend_context.h"

namespace muster::comm::nccl_backend {

c10::intrusive_ptr<Backend> create(const BackendContext& context);
std::string unavailable_reason();

}  // namespace muster::comm::nccl_backend
