// The nccl backend: libtorch's ProcessGroupNCCL behind Muster's interface, for CUDA tensors, and another backend of the
// same ranks for CPU tensors. Compiled only if libtorch has CUDA and NCCL.
//
// An operation goes where its tensors are. Those of CPU tensors go to the other backend: "auto", or the one that
// "nccl:gloo" names. So whatever Muster tells between ranks (what a module looks like, whether gradients are finite)
// costs no kernel and does not wait for the device. The tensors of an operation are on a CUDA device on all ranks, or
// on none. Nothing compares the ranks' operations on CUDA tensors. ReduceOptions::between_hosts and an operation's own
// timeout have no effect on them.
//
// Works of CUDA tensors are NCCL's own. As usual in PyTorch, run() and Work::wait() do not block the calling thread
// until the operation is complete: they make the current CUDA stream wait for it. barrier() blocks until all ranks have
// come and the work on the current streams of all devices is done; barrier_async() does not wait for the devices. A
// tensor that is not contiguous is copied; then the current stream waits for the operation as soon as it is submitted.
//
// In the black box, operations on CUDA tensors are those of a group "NAME (CUDA)". One is running while it is being
// queued, and then done: nothing asks the device. One that does not end on the device is what the ranks did last, and
// NCCL's timeout names it.
//
// The first operation on CUDA tensors makes NCCL's communicator: a call without a deadline, in which all ranks must
// take part. A collective is preceded by a barrier of the other backend, so that ranks that never come are noticed.
//
// Failure. If the other backend's group fails, a thread aborts NCCL's communicators within a tenth of a second, so that
// kernels that wait for a lost peer end. What they have computed is undefined. The next operation throws the failure.
// If an operation of NCCL is over the group's timeout, libtorch aborts the communicators a minute later, and the next
// operation throws Unavailable on all ranks. (libtorch's default is to end the process. Muster sets
// TORCH_NCCL_ASYNC_ERROR_HANDLING and TORCH_NCCL_DUMP_ON_TIMEOUT if the user has not.) After an abort, libtorch's
// object and its thread stay until the process ends.
//
// Operations that NCCL does not have (scan, bitwise reductions, sparse tensors, receives from any source) throw
// InvalidArgument for CUDA tensors.
//
// Thread-safety: as Backend. A mutex is held while an operation is queued, because libtorch's object is for one thread.
#pragma once

#include "comm/core/backend.h"
#include "comm/core/backend_context.h"

namespace muster::comm::nccl_backend {

c10::intrusive_ptr<Backend> create(const BackendContext& context);
std::string unavailable_reason();

}  // namespace muster::comm::nccl_backend
