#include "parallel/watched.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "parallel/shared_tensor.h"

namespace muster::parallel {
namespace {

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// The key set of a tensor is protected; a derived class may name it.
struct KeySet : c10::TensorImpl {
  static c10::DispatchKeySet& of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->*(&KeySet::key_set_);
  }
};

// Whether an operator reads or writes elements of its arguments.
bool uses_elements(const c10::FunctionSchema& schema) {
  const std::string_view name = schema.name();
  constexpr std::array<std::string_view, 4> kOthers = {"aten::_has_compatible_shallow_copy_type",  // set_data()
                                                       "aten::_backward", "aten::is_same_size", "aten::_version"};
  if (name.ends_with("_like") || name.starts_with("aten::new_") ||
      std::find(kOthers.begin(), kOthers.end(), name) != kOthers.end())
    return false;
  // Views; and operators such as contiguous(), which make a view or call another operator.
  return schema.returns().empty() ||
         !std::all_of(schema.returns().begin(), schema.returns().end(), [](const auto& value) {
           return value.alias_info() != nullptr && !value.alias_info()->isWrite();
         });
}

// An operator that is made of others: each of them comes here by itself.
bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

bool needs_values(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, bool> known;
  const auto [at, is_new] = known.try_emplace(&op.schema());
  if (is_new) at->second = uses_elements(op.schema()) && !is_composite(op);
  return at->second;
}

void before_use(const at::Tensor& tensor, uint64_t operation) {
  if (is_watched(tensor)) call_before_use(tensor, operation);
}

void before_use(const c10::IValue& value, uint64_t operation) {
  if (value.isTensor()) {
    before_use(value.toTensor(), operation);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) before_use(tensor, operation);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      if (tensor) before_use(*tensor, operation);
  }
}

void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  thread_local uint64_t operations = 0;
  if (needs_values(op)) {
    const uint64_t operation = ++operations;
    for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size()))
      before_use(argument, operation);
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

}  // namespace

bool is_watched(const at::Tensor& tensor) { return tensor.defined() && tensor.key_set().has(kKey); }

at::Tensor unwatched(const at::Tensor& tensor) {
  return at::empty({0}, tensor.options().requires_grad(false))
      .set_(tensor.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

void watch(const at::Tensor& tensor) {
  static const torch::Library library = [] {
    torch::Library fallback(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    fallback.fallback(torch::CppFunction::makeFromBoxedFunction<&call>());
    return fallback;
  }();
  c10::DispatchKeySet& keys = KeySet::of(tensor);
  keys = keys.add(kKey);
}

}  // namespace muster::parallel
