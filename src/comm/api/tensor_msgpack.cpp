#include "muster/comm/tensor_msgpack.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::detail {

PackContext& pack_context() noexcept {
  thread_local constinit PackContext context;
  return context;
}

at::Tensor packable(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu())
    throw InvalidArgument(text("a tensor of an object is on ", tensor.device().str()), "Move it with .cpu()");
  if (tensor.layout() != at::kStrided)
    throw InvalidArgument("a tensor of an object is sparse", "Call .to_dense() first");
  if (tensor.is_quantized()) throw InvalidArgument("a tensor of an object is quantized", "Call .dequantize() first");
  const at::NoGradGuard no_grad;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

at::Tensor tensor_like(int64_t dtype, const std::vector<int64_t>& sizes, uint64_t bytes) {
  if (dtype < 0 || dtype >= static_cast<int64_t>(at::ScalarType::NumOptions)) return {};
  uint64_t numel = 1;
  for (const int64_t size : sizes)
    if (size < 0 || __builtin_mul_overflow(numel, static_cast<uint64_t>(size), &numel)) return {};
  const auto type = static_cast<at::ScalarType>(dtype);
  try {
    if (const uint64_t item = c10::elementSize(type); numel > UINT64_MAX / item || numel * item != bytes) return {};
    at::empty({0}, type);
  } catch (const c10::Error&) {  // dense tensors cannot have this dtype
    return {};
  }
  try {
    return at::empty(sizes, type);
  } catch (const c10::Error&) {
    throw Unavailable(text("there is no memory for a tensor of ", bytes, " bytes that an object has"));
  }
}

at::Tensor tensor_in_stream(const msgpack::object& in) {
  if (in.is_nil()) return {};
  if (in.type != msgpack::type::ARRAY || in.via.array.size < 2) throw msgpack::type_error();
  const auto* const parts = in.via.array.ptr;
  uint64_t bytes = 0;
  for (uint32_t i = 2; i < in.via.array.size; ++i) {
    if (parts[i].type != msgpack::type::BIN) throw msgpack::type_error();
    bytes += parts[i].via.bin.size;
  }
  at::Tensor tensor = tensor_like(parts[0].as<int64_t>(), parts[1].as<std::vector<int64_t>>(), bytes);
  if (!tensor.defined()) throw msgpack::type_error();
  char* to = static_cast<char*>(tensor.mutable_data_ptr());
  for (uint32_t i = 2; i < in.via.array.size; ++i) to = std::copy_n(parts[i].via.bin.ptr, parts[i].via.bin.size, to);
  return tensor;
}

const at::Tensor& tensor_beside(const msgpack::object& in, const std::vector<at::Tensor>& tensors) {
  uint32_t index;
  if (in.type != msgpack::type::EXT || in.via.ext.size != sizeof index || in.via.ext.type() != kTensorExt)
    throw msgpack::type_error();
  std::memcpy(&index, in.via.ext.data(), sizeof index);
  if (index >= tensors.size()) throw msgpack::type_error();
  return tensors[index];
}

}  // namespace muster::detail
