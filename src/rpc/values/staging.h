// Moves bytes of tensors between other devices and the CPU's memory, by libtorch's own copies, so for any device that
// it knows.
//
// Both copies block until the bytes are there. They use the thread's current stream of the device: they include what
// was put on that stream before, and what is put on any stream afterwards sees them.
//
// Errors: what the device's allocator and copy throw. Thread-safety: functions of their arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>

namespace muster::rpc::detail {

// Bytes of a storage on a device, as a tensor of bytes on the CPU.
at::Tensor to_host(const c10::Storage& storage, size_t begin, size_t bytes);
// A storage on a device, with these bytes.
c10::Storage to_device(const std::byte* data, size_t bytes, c10::Device device);
// A tensor without autograd history. Empty `strides` means row by row; a null `storage` means a new storage, as large
// as the tensor needs.
at::Tensor on_device(c10::Storage storage, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                     int64_t offset, c10::Device device);

}  // namespace muster::rpc::detail
