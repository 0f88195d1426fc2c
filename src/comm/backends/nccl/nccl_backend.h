// The nccl backend: libtorch's ProcessGroupNCCL behind Muster's interface, for CUDA tensors. Compiled only where
// libtorch has CUDA and NCCL.
//
// Works are NCCL's own: an operation is complete, as far as the calling thread is concerned, when it is enqueued on the
// current CUDA stream (run() and Work::wait() make that stream wait for it), as PyTorch's users know it. Blocking the
// thread as well is torch::cuda::synchronize()'s business.
//
// What NCCL does not know (bitwise reductions, unequal parts in lists for reduce_scatter, sparse tensors, receives from
// any source) is InvalidArgument.
#pragma once

#include "comm/backend.h"

namespace muster::comm::nccl_backend {

c10::intrusive_ptr<Backend> create(const BackendContext& context);
std::string why_not();

}  // namespace muster::comm::nccl_backend
