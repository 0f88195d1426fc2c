// Whole<T> keeps a tensor or container whole where a partitioner would split it (comm/tensor_tree.h: which tensors a
// value has), if a function has one besides the batch:
//
//   at::Tensor loss(muster::Whole<std::vector<at::Tensor>> parameters, at::Tensor batch);
//
// A struct that is sent by MSGPACK_DEFINE, a rpc::ModuleState for example, stays whole anyway unless it has tree().
//
// Thread-safety: that of the value.
#pragma once

#include <utility>

#include "muster/comm/tensor_tree.h"
#include "muster/rpc/serialize.h"

namespace muster {

// A value that goes to every part as it is.
template <typename T>
struct Whole {
  T value{};

  Whole() = default;
  Whole(T given) : value(std::move(given)) {}
  operator const T&() const { return value; }
  const T& operator*() const { return value; }
  const T* operator->() const { return &value; }
  MSGPACK_DEFINE(value);
};
template <typename T>
inline constexpr bool rpc::is_sendable<Whole<T>> = rpc::is_sendable<T>;

}  // namespace muster
