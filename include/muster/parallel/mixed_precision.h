// Mixed precision: forward() and backward() compute with copies of the parameters, of fewer bits; the parameters
// themselves, their gradients and the optimizer's states keep their own dtype.
//
//   muster::DistributedDataParallel ddp(
//       net, {.mixed_precision = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat}});
//
// Each parameter with another dtype than param_dtype has a copy: of FullyShardedDataParallel one on each host, of
// DistributedDataParallel one on each rank. While model.forward() runs, an operator that reads the parameter gets the
// copy instead: `weight` in forward() still is a float32 tensor, but torch::linear(x, weight) and weight.t() compute
// with a bfloat16 one. backward() uses what forward() has used. Nothing may change a copy: weight.to(torch::kBFloat16)
// in forward() is the copy itself, so a function that changes its result has to clone() it.
//
// DistributedDataParallel makes the copies at the beginning of each forward(). Outside of forward() the module has its
// parameters: for the loss, for optimizers, and if it is called by itself. Its parameters must be dense and on the CPU.
// Gradients that a communication hook sends ignore reduce_dtype.
//
// FullyShardedDataParallel makes the copies before the first forward() of a step, and keeps them in use until the end
// of a backward() that averages, or until synchronize(). So what is computed between forward() and backward() has the
// copies, too.
//
// Gradients arrive in the parameter's dtype; those of several operators are added in it. Within one operator that uses
// a parameter many times, as a GRU does, they are added in param_dtype.
//
// Thread-safety: as FullyShardedDataParallel and DistributedDataParallel. Source:
// torch.distributed.fsdp.MixedPrecisionPolicy; Micikevicius et al., "Mixed Precision Training", ICLR 2018.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster {

// Each dtype is bfloat16, float16, float32 or float64. Without a value, what it says keeps its own.
//
// For a part of a model.
struct ModulePrecision {
  std::optional<at::ScalarType> param_dtype, reduce_dtype, buffer_dtype;  // as MixedPrecision's
};

struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype;   // of the copies
  std::optional<at::ScalarType> reduce_dtype;  // in which gradients travel between hosts: fewer bytes, fewer digits
  std::optional<at::ScalarType> buffer_dtype;  // to which the constructor converts floating-point buffers, for good
  std::optional<at::ScalarType> output_dtype;  // to which floating-point results of forward() are converted
  // Converts floating-point arguments of forward() to param_dtype: tensors, and vectors, arrays, optionals, pairs and
  // tuples with tensors. An argument that is converted is a copy, so forward() cannot give anything back through it.
  bool cast_forward_inputs = true;

  // Modules whose own parameters and buffers stay as they are, such as normalisations. With 16 bits, batch and instance
  // normalisations always do, because their operator needs parameters and statistics in float32.
  std::function<bool(const torch::nn::Module&)> full_precision;

  // For a module that is to have other dtypes than those above, and for all modules within it for which this gives no
  // others; nullopt for all the rest. forward() of such a module gets its inputs as they are, so it has to convert
  // them. A parameter of several modules has the dtypes of the first one, in the order of modules().
  std::function<std::optional<ModulePrecision>(const torch::nn::Module&)> of_module;
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

// Whether a value holds a tensor of floating-point numbers with another dtype.
bool lacks_dtype(const at::Tensor& tensor, at::ScalarType dtype);
template <typename T>
bool lacks_dtype(const T& value, at::ScalarType dtype) {
  if constexpr (!kHasTensors<T>)
    return false;
  else if constexpr (requires { value.has_value(); })
    return value && lacks_dtype(*value, dtype);
  else if constexpr (requires { value.begin(); })
    return std::any_of(value.begin(), value.end(), [&](const auto& each) { return lacks_dtype(each, dtype); });
  else
    return std::apply([&](const auto&... each) { return (lacks_dtype(each, dtype) || ...); }, value);
}

// Converts such tensors.
void convert(at::Tensor& tensor, at::ScalarType dtype);
template <typename T>
void convert(T& value, at::ScalarType dtype) {
  if constexpr (!kHasTensors<T>) {  // also of const parts
  } else if constexpr (requires { value.has_value(); }) {
    if (value) convert(*value, dtype);
  } else if constexpr (requires { value.begin(); }) {
    for (auto& each : value) convert(each, dtype);
  } else {
    std::apply([&](auto&... each) { (convert(each, dtype), ...); }, value);
  }
}

// An argument of forward(), converted if a dtype is given.
template <typename T>
class Input {
 public:
  Input(T&& value, const std::optional<at::ScalarType>& dtype) : given_(static_cast<T&&>(value)) {
    if constexpr (kConverts)
      if (dtype && lacks_dtype(given_, *dtype)) convert(converted_.emplace(static_cast<T&&>(given_)), *dtype);
  }
  T&& get() {
    if constexpr (kConverts)
      if (converted_) return static_cast<T&&>(*converted_);
    return static_cast<T&&>(given_);
  }

 private:
  using Plain = std::remove_cvref_t<T>;
  static constexpr bool kConverts = kHasTensors<Plain> && std::is_constructible_v<Plain, T&&>;
  struct Nothing {};
  T&& given_;
  [[no_unique_address]] std::conditional_t<kConverts, std::optional<Plain>, Nothing> converted_;
};

// What forward() gives for such inputs, converted if a dtype is given.
template <typename Function, typename... Inputs>
auto with_output_dtype(const std::optional<at::ScalarType>& dtype, const Function& forward, Inputs&&... inputs) {
  if constexpr (std::is_void_v<decltype(forward(inputs...))>) {
    forward(inputs...);
  } else {
    auto result = forward(inputs...);
    if (dtype) convert(result, *dtype);
    return result;
  }
}

}  // namespace parallel
}  // namespace muster
