#include "parallel/tape/watched.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/auto_reset.h"
#include "parallel/kit/every_operator.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/tape/kept_results.h"

namespace muster::parallel {
namespace {

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;
constexpr auto kLastDevice = static_cast<size_t>(c10::BackendComponent::EndOfBackendKeys);

// The key set of a tensor is protected; a derived class may name it.
struct KeySet : c10::TensorImpl {
  static c10::DispatchKeySet& of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->*(&KeySet::key_set_);
  }
};

bool is_of_libtorch(const c10::FunctionSchema& schema) { return schema.name().starts_with("aten::"); }

// Whether an operator is about its arguments as objects, whatever their elements are.
bool is_about_objects(const c10::FunctionSchema& schema) {
  constexpr std::array<std::string_view, 12> kAll = {"aten::_has_compatible_shallow_copy_type",  // set_data()
                                                     "aten::set_",                               // torch::load()
                                                     "aten::set_data",
                                                     "aten::data",
                                                     "aten::_backward",
                                                     "aten::_version",
                                                     "aten::is_same_size",
                                                     "aten::is_leaf",
                                                     "aten::output_nr",
                                                     "aten::requires_grad_",
                                                     "aten::retain_grad",
                                                     "aten::retains_grad"};
  return std::find(kAll.begin(), kAll.end(), schema.name()) != kAll.end();
}

// Whether an operator reads or writes elements of its arguments.
bool uses_elements(const c10::FunctionSchema& schema) {
  const std::string_view name = schema.name();
  if (!is_of_libtorch(schema)) return true;
  if (name.ends_with("_like") || name.starts_with("aten::new_") || is_about_objects(schema)) return false;
  // Views; and operators such as contiguous(), which make a view or call another operator.
  const auto is_view = [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  };
  return schema.returns().empty() || !std::all_of(schema.returns().begin(), schema.returns().end(), is_view);
}

// How an operator deals with arguments on one type of device.
struct Kind {
  bool may_get_others = false;  // arguments instead of its own
  bool needs_values = false;
  bool is_kernel = false;  // what it calls gets no more than what its arguments refer to
};
Kind kind_on(const c10::OperatorHandle& op, c10::BackendComponent device) {
  const c10::FunctionSchema& schema = op.schema();
  const auto dense = c10::toRuntimePerBackendFunctionalityKey(c10::DispatchKey::Dense, device);
  const bool has_kernel = op.hasKernelForDispatchKey(dense);
  // One of libtorch's operators that is made of others there: each of these comes here by itself.
  const bool is_composite =
      is_of_libtorch(schema) && !has_kernel && op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  return {.may_get_others = !is_about_objects(schema),
          .needs_values = uses_elements(schema) && !is_composite,
          .is_kernel = is_of_libtorch(schema) || has_kernel};
}
const Kind& kind_of(const c10::OperatorHandle& op, c10::DispatchKeySet keys) {
  const c10::BackendComponent device = keys.highestBackendKey();
  thread_local std::array<std::unordered_map<const c10::FunctionSchema*, Kind>, 1 + kLastDevice> known;
  const auto [at, is_new] = known[static_cast<size_t>(device)].try_emplace(&op.schema());
  if (is_new) at->second = kind_on(op, device);
  return at->second;
}

at::Tensor instead_of(const at::Tensor& tensor) { return is_watched(tensor) ? call_instead(tensor) : at::Tensor(); }

// The functions that replace return whether what replaces is on another device.

// A list may be the caller's own; so a list with a replacement is another list.
template <typename Element>
bool replace_in(const c10::List<Element>& all, c10::IValue& value) {
  c10::List<Element> others;
  bool moves = false;
  for (size_t i = 0; i < all.size(); ++i) {
    const std::optional<at::Tensor> tensor = all.get(i);
    at::Tensor other = tensor ? instead_of(*tensor) : at::Tensor();
    if (!other.defined()) continue;
    moves |= other.device() != tensor->device();
    if (others.empty()) others = all.copy();
    others.set(i, std::move(other));
  }
  if (!others.empty()) value = std::move(others);
  return moves;
}

bool replace(c10::IValue& value) {
  if (value.isTensorList()) return replace_in(value.toTensorList(), value);
  if (value.isOptionalTensorList()) return replace_in(value.toOptionalTensorList(), value);
  if (!value.isTensor()) return false;
  at::Tensor other = instead_of(value.toTensor());
  if (!other.defined()) return false;
  const bool moves = other.device() != value.toTensor().device();
  value = std::move(other);
  return moves;
}

struct Use {
  uint64_t operation;
  bool writes;
};

void before(const Use& use, const at::Tensor& tensor) {
  if (is_watched(tensor)) call_before_use(tensor, use.operation, use.writes);
}

void before(const Use& use, const c10::IValue& value) {
  if (value.isTensor()) {
    before(use, value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) before(use, tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      if (tensor) before(use, *tensor);
  }
}

// Whether this thread is in a kernel, whose arguments are all here. What it calls needs no more than
// these, and must not make one of them go.
thread_local bool in_kernel = false;

void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static std::atomic<uint64_t> operations = 0;
  std::optional<AutoReset<bool>> guard;
  bool moves = false;
  if (!in_kernel && !at::in_parallel_region()) {
    const KeptResults::Pause none_of_the_users;
    const Kind& kind = kind_of(op, keys);
    const auto& arguments = op.schema().arguments();
    if (kind.may_get_others)
      for (size_t i = 0; i < arguments.size(); ++i)
        if (!is_written(arguments[i])) moves |= replace(torch::jit::peek(*stack, i, arguments.size()));
    if (kind.needs_values && !moves) {
      const uint64_t operation = ++operations;
      for (size_t i = 0; i < arguments.size(); ++i)
        before({operation, is_written(arguments[i])}, torch::jit::peek(*stack, i, arguments.size()));
      if (kind.is_kernel) guard.emplace(in_kernel, true);
    }
  }
  if (moves) return op.callBoxed(stack);  // `keys` are of the arguments before; it comes here once more, for the copies
  go_on_after(kKey, op, keys, stack);
}

}  // namespace

bool is_watched(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kKey) && may_be_watched(tensor);
}

at::Tensor unwatched(const at::Tensor& tensor) {
  if (!is_watched(tensor)) return tensor.detach();
  return at::empty({0}, tensor.options().requires_grad(false))
      .set_(tensor.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

UnwatchedGuard::UnwatchedGuard() : without_(c10::DispatchKeySet(kKey)) {}

bool in_backward() { return torch::autograd::get_current_graph_task_id() >= 0; }

void watch(const at::Tensor& tensor) {
  bring_every_operator_to<kKey, &call>();
  c10::DispatchKeySet& keys = KeySet::of(tensor);
  keys = keys.add(kKey);
}

}  // namespace muster::parallel
