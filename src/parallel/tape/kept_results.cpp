#include "parallel/tape/kept_results.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "parallel/kit/every_operator.h"

namespace muster::parallel {
namespace {

constexpr auto kKeptKey = c10::DispatchKey::Fake;

thread_local KeptResults::Call* current_call = nullptr;

// Whether an operator returns new tensors only. A conversion is cheap, and autocast's cache makes it happen in one call
// and not in the other.
bool returns_new_tensors(const c10::FunctionSchema& schema) {
  const auto is_new = [](const c10::Argument& result) {
    return !result.alias_info() && result.type()->isSubtypeOf(*c10::TensorType::get());
  };
  return !schema.is_mutable() && schema.name() != "aten::_to_copy" && schema.name() != "aten::_unsafe_view" &&
         !schema.returns().empty() && std::all_of(schema.returns().begin(), schema.returns().end(), is_new);
}

struct OperatorTraits {
  std::string name;
  bool may_be_kept = false;       // unless it draws random numbers
  std::optional<size_t> dropout;  // it draws none if this argument is 0
  bool is_random = false;
};
const OperatorTraits& traits_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, OperatorTraits> known;
  const auto [at, is_new] = known.try_emplace(&op.schema());
  if (!is_new) return at->second;
  OperatorTraits& traits = at->second;
  traits = {.name = op.schema().name(),
            .may_be_kept = returns_new_tensors(op.schema()),
            .is_random = op.hasTag(at::Tag::nondeterministic_seeded)};
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == "dropout_p") traits.dropout = i;
  return traits;
}

// Attention is random only if it drops something.
bool may_be_kept(const OperatorTraits& traits, const torch::jit::Stack& stack, size_t arguments) {
  if (!traits.may_be_kept || !traits.is_random) return traits.may_be_kept;
  return traits.dropout && torch::jit::peek(stack, *traits.dropout, arguments).toDouble() == 0;
}

const void* memory_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// The same memory, outside of any graph.
at::Tensor alias(const at::Tensor& tensor, const c10::VariableVersion& version) {
  return at::Tensor(
      tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(version, /*allow_tensor_metadata_change=*/true));
}

}  // namespace

void KeptResults::fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto compute = [&] {
    const c10::impl::ExcludeDispatchKeyGuard not_inside(kKeptKey);
    go_on_after(kKeptKey, op, keys, stack);
  };
  Call* const call = current_call;
  if (!call) return compute();
  const OperatorTraits& traits = traits_of(op);
  const size_t arguments = op.schema().arguments().size(), returns = op.schema().returns().size();
  if (!may_be_kept(traits, *stack, arguments)) {
    if (call->keep_ && op.schema().is_mutable())
      for (size_t i = 0; i < arguments; ++i) {
        const c10::IValue& argument = torch::jit::peek(*stack, i, arguments);
        if (is_written(op.schema().arguments()[i]) && argument.isTensor())
          call->results_.before_write(argument.toTensor(), call->keeper_);
      }
    compute();
    if (call->keep_) call->results_.note_aliases(*stack, returns);
    return;
  }
  auto which = std::pair(traits.name, call->numbers_[traits.name]++);
  if (call->keep_) {
    compute();
    if ((*call->keep_)(traits.name)) call->results_.keep(std::move(which), *stack, returns, call->keeper_);
    return;
  }
  const auto found = call->results_.kept_.find(which);
  if (found != call->results_.kept_.end()) ++call->found_;
  if (found == call->results_.kept_.end() || !call->results_.give(found->second, *stack, arguments)) compute();
}

void KeptResults::keep(std::pair<std::string, size_t> which, const torch::jit::Stack& stack, size_t results,
                       Keeper* keeper) {
  const auto fresh = std::make_shared<New>();
  for (const c10::IValue& value : torch::jit::last(stack, results)) fresh->tensors.push_back(value.toTensor());
  if (std::any_of(fresh->tensors.begin(), fresh->tensors.end(),
                  [](const at::Tensor& tensor) { return !tensor.defined() || tensor.is_inference(); }))
    return;
  Result& result = kept_[std::move(which)];
  fresh->result = &result;
  const Keeping keeping(keeper);
  for (at::Tensor& tensor : fresh->tensors) {
    const c10::VariableVersion version = tensor.unsafeGetTensorImpl()->version_counter();
    tensor = alias(tensor, version);  // without the graph that it becomes a part of
    result.versions.push_back({version, version.current_version()});
    result.tensors.emplace_back(tensor, /*is_output=*/false);
    if (const void* const memory = memory_of(tensor)) by_memory_[memory] = fresh;
  }
}

// Keeps copies of a result's tensors from now on, because an operator is about to change one.
void KeptResults::before_write(const at::Tensor& tensor, Keeper* keeper) {
  const auto found = by_memory_.find(memory_of(tensor));
  if (found == by_memory_.end()) return;
  const auto changed = found->second;
  std::erase_if(by_memory_, [&](const auto& each) { return each.second == changed; });
  const Pause none_of_the_users;
  const at::NoGradGuard no_grad;
  Result& result = *changed->result;
  const Keeping keeping(keeper);
  result.tensors.clear();
  for (const at::Tensor& each : changed->tensors) result.tensors.emplace_back(each.clone(), /*is_output=*/false);
  result.versions.clear();
  result.is_copy = true;
}

// aten::_unsafe_view() and the like return a tensor with the memory of another, and a version of its own.
void KeptResults::note_aliases(const torch::jit::Stack& stack, size_t results) {
  if (by_memory_.empty()) return;
  for (auto value = stack.end() - static_cast<std::ptrdiff_t>(results); value != stack.end(); ++value) {
    if (!value->isTensor()) continue;
    const at::Tensor& tensor = value->toTensor();
    const auto found = by_memory_.find(memory_of(tensor));
    if (found == by_memory_.end() || tensor.is_inference()) continue;
    const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
    found->second->result->versions.push_back({version, version.current_version()});
  }
}

bool KeptResults::give(const Result& result, torch::jit::Stack& stack, size_t arguments) const {
  if (std::any_of(result.versions.begin(), result.versions.end(),
                  [](const Version& version) { return version.counter.current_version() != version.then; }))
    return false;
  torch::jit::drop(stack, arguments);
  for (const auto& saved : result.tensors) {
    const at::Tensor tensor = saved.unpack();
    const Pause none_of_the_users;
    const at::NoGradGuard no_grad;
    stack.emplace_back(result.is_copy ? tensor.clone() : alias(tensor, 0));
  }
  return true;
}

KeptResults::Call::Call(KeptResults& results, const Policy* keep, Keeper* keeper)
    : results_(results),
      keep_(keep),
      keeper_(keeper),
      include_([] {
        bring_every_operator_to<kKeptKey, &KeptResults::fallback>();
        return kKeptKey;
      }()),
      set_(current_call, this) {}

KeptResults::Call::~Call() {
  if (keep_) results_.by_memory_.clear();
}

KeptResults::Pause::Pause() : set_(current_call, nullptr) {}

}  // namespace muster::parallel
