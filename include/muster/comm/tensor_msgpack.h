// How msgpack-cxx packs at::Tensor: into the bytes, or beside them.
//
// In an object collective (objects.h) a tensor is an array in the stream: dtype, sizes, and its elements in byte
// strings; an undefined one is nil. If the thread has a PackContext::Scope with lists of tensors, as in a remote call,
// packing appends the tensor to the list `out` and writes its index to the stream (an ext of type kTensorExt, 4 bytes,
// little-endian); unpacking takes the tensor from the list `in`. `user` is for types that need more than their bytes to
// be packed, such as references to remote objects.
//
// Errors while packing: InvalidArgument, for a tensor that cannot be in a stream (sparse, quantized, not on the CPU).
// While unpacking: msgpack::type_error, which the caller turns into CorruptError. Thread-safety: the context is per thread.
#pragma once

#if !__has_include(<msgpack.hpp>)
#error "this header of Muster needs <msgpack.hpp>: apt-get install libmsgpack-cxx-dev"
#endif
#ifndef MSGPACK_NO_BOOST
#define MSGPACK_NO_BOOST  // it needs Boost only for Boost's own types
#endif
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <msgpack.hpp>
#include <vector>

namespace muster::detail {

struct PackContext {
  std::vector<at::Tensor>* out = nullptr;       // while tensors are packed beside the stream
  const std::vector<at::Tensor>* in = nullptr;  // while tensors from beside the stream are unpacked
  void* user = nullptr;

  // Makes a context the thread's, for as long as the scope lives; scopes nest.
  class Scope;
};
PackContext& pack_context() noexcept;  // of the calling thread

class PackContext::Scope {
 public:
  explicit Scope(const PackContext& context) : before_(pack_context()) { pack_context() = context; }
  ~Scope() { pack_context() = before_; }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  const PackContext before_;
};

inline constexpr int8_t kTensorExt = 1;

at::Tensor packable(const at::Tensor& tensor);  // contiguous; InvalidArgument if it cannot be in a stream
// An undefined tensor if dtype and sizes do not describe a tensor of `bytes` bytes.
at::Tensor tensor_like(int64_t dtype, const std::vector<int64_t>& sizes, uint64_t bytes);
inline constexpr size_t kTensorPiece = size_t{1} << 30;  // a byte string of msgpack has at most 4 GiB

template <typename Stream>
void pack_in_stream(msgpack::packer<Stream>& out, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    out.pack_nil();
    return;
  }
  const at::Tensor flat = packable(tensor);
  const size_t bytes = flat.nbytes(), pieces = (bytes + kTensorPiece - 1) / kTensorPiece;
  out.pack_array(static_cast<uint32_t>(2 + pieces));
  out.pack(static_cast<int64_t>(flat.scalar_type()));
  out.pack(flat.sizes().vec());
  const char* const data = static_cast<const char*>(flat.const_data_ptr());
  for (size_t at = 0; at < bytes; at += kTensorPiece) {
    const auto piece = static_cast<uint32_t>(std::min(bytes - at, kTensorPiece));
    out.pack_bin(piece);
    out.pack_bin_body(data + at, piece);
  }
}
at::Tensor tensor_in_stream(const msgpack::object& in);
const at::Tensor& tensor_beside(const msgpack::object& in, const std::vector<at::Tensor>& tensors);

}  // namespace muster::detail

namespace msgpack {
MSGPACK_API_VERSION_NAMESPACE(MSGPACK_DEFAULT_API_NS) {
  namespace adaptor {

  template <>
  struct pack<at::Tensor> {
    template <typename Stream>
    packer<Stream>& operator()(packer<Stream>& out, const at::Tensor& tensor) const {
      auto* const list = muster::detail::pack_context().out;
      if (list == nullptr) {
        muster::detail::pack_in_stream(out, tensor);
        return out;
      }
      const auto index = static_cast<uint32_t>(list->size());
      list->push_back(tensor);
      char bytes[sizeof index];
      std::memcpy(bytes, &index, sizeof index);
      out.pack_ext(sizeof bytes, muster::detail::kTensorExt);
      out.pack_ext_body(bytes, sizeof bytes);
      return out;
    }
  };

  template <>
  struct convert<at::Tensor> {
    const msgpack::object& operator()(const msgpack::object& in, at::Tensor& tensor) const {
      const auto* const list = muster::detail::pack_context().in;
      tensor = list ? muster::detail::tensor_beside(in, *list) : muster::detail::tensor_in_stream(in);
      return in;
    }
  };

  }  // namespace adaptor
}
}  // namespace msgpack
