// Mixed precision: forward() and backward() compute with copies of the parameters, of fewer bits; the parameters themselves,
// their gradients and the optimizer's states keep their own dtype.
//
//   muster::FsdpOptions options{.mixed_precision = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat}};
//
// Each parameter with more bits than param_dtype has one copy on each host, which its owner makes from it before the first
// forward() of a step. From then on until the end of backward(), an operator that reads the parameter gets the copy
// instead: `weight` in forward() still is a float32 tensor, but torch::linear(x, weight) and weight.t() compute with a
// bfloat16 one. In eval() mode, model.forward() computes like that as well; the module itself, called between two
// synchronize(), computes with the parameters.
//
// Thread-safety: as FullyShardedDataParallel. Source: torch.distributed.fsdp.MixedPrecisionPolicy; Micikevicius et al.,
// "Mixed Precision Training", ICLR 2018.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <array>
#include <cstddef>
#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster {

// Each dtype is a floating-point type. Without a value, what it says keeps its own.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype;  // of the copies
  std::optional<at::ScalarType>
      reduce_dtype;  // in which gradients are averaged; their own is more exact, and more bytes
  std::optional<at::ScalarType> buffer_dtype;  // to which the constructor converts floating-point buffers, for good
  std::optional<at::ScalarType> output_dtype;  // to which floating-point results of forward() are converted
  bool cast_forward_inputs = true;             // floating-point arguments of forward() are converted to param_dtype

  // Modules whose own parameters and buffers stay as they are, such as normalisations. Batch normalisations always do,
  // because their operator needs parameters and statistics of one dtype.
  std::function<bool(const torch::nn::Module&)> full_precision;
};

namespace parallel {

template <typename T>
inline constexpr bool kHasTensors = std::is_same_v<T, at::Tensor>;
template <typename T>
inline constexpr bool kHasTensors<std::vector<T>> = kHasTensors<T>;
template <typename T>
inline constexpr bool kHasTensors<std::optional<T>> = kHasTensors<T>;
template <typename T, size_t kSize>
inline constexpr bool kHasTensors<std::array<T, kSize>> = kHasTensors<T>;
template <typename... T>
inline constexpr bool kHasTensors<std::tuple<T...>> = (kHasTensors<T> || ...);
template <typename A, typename B>
inline constexpr bool kHasTensors<std::pair<A, B>> = kHasTensors<A> || kHasTensors<B>;

at::Tensor with_dtype(const at::Tensor& tensor, at::ScalarType dtype);  // if it is one of floating-point numbers

// A copy with all such tensors in it converted.
template <typename T>
T with_dtype(T value, at::ScalarType dtype) {
  if constexpr (!kHasTensors<T>) {
    return value;
  } else if constexpr (requires { value.has_value(); }) {
    if (value) *value = with_dtype(std::move(*value), dtype);
  } else if constexpr (requires { value.begin(); }) {
    for (auto& each : value) each = with_dtype(std::move(each), dtype);
  } else {
    std::apply([&](auto&... each) { ((each = with_dtype(std::move(each), dtype)), ...); }, value);
  }
  return value;
}

// An argument of forward(), converted if a dtype is given.
template <typename T>
class Input {
 public:
  Input(T&& value, const std::optional<at::ScalarType>& dtype) : given_(static_cast<T&&>(value)) {
    if constexpr (kHasTensors<Plain>)
      if (dtype) converted_.emplace(with_dtype(Plain(given_), *dtype));
  }
  T&& get() {
    if constexpr (kHasTensors<Plain>)
      if (converted_) return static_cast<T&&>(*converted_);
    return static_cast<T&&>(given_);
  }

 private:
  using Plain = std::remove_cvref_t<T>;
  struct Nothing {};
  T&& given_;
  [[no_unique_address]] std::conditional_t<kHasTensors<Plain>, std::optional<Plain>, Nothing> converted_;
};

}  // namespace parallel
}  // namespace muster
