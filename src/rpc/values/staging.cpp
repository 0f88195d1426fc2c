#include "rpc/values/staging.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

namespace muster::rpc::detail {

at::Tensor on_device(c10::Storage storage, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                     int64_t offset, c10::Device device) {
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions(dtype).device(device);
  const bool row_by_row = strides.size() != sizes.size();
  if (!storage) return row_by_row ? at::empty(sizes, options) : at::empty_strided(sizes, strides, options);
  at::Tensor tensor = at::empty({0}, options);
  if (!row_by_row) return tensor.set_(std::move(storage), offset, sizes, strides);
  at::DimVector dense(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    dense[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return tensor.set_(std::move(storage), offset, sizes, dense);
}

at::Tensor to_host(const c10::Storage& storage, size_t begin, size_t bytes) {
  const at::NoGradGuard no_grad;
  const auto size = static_cast<int64_t>(bytes);
  const at::Tensor there = on_device(storage, at::kByte, {size}, {}, static_cast<int64_t>(begin), storage.device());
  at::Tensor here = at::empty({size}, at::TensorOptions(at::kByte).device(at::kCPU));
  here.copy_(there, /*non_blocking=*/false);
  return here;
}

c10::Storage to_device(const std::byte* data, size_t bytes, c10::Device device) {
  const at::NoGradGuard no_grad;
  const auto size = static_cast<int64_t>(bytes);
  const at::Tensor here = at::from_blob(const_cast<std::byte*>(data), {size}, at::TensorOptions(at::kByte));
  at::Tensor there = at::empty({size}, at::TensorOptions(at::kByte).device(device));
  there.copy_(here, /*non_blocking=*/false);
  return there.storage();
}

}  // namespace muster::rpc::detail
