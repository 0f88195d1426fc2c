#include "parallel/kept_results.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::parallel {
namespace {

constexpr auto kKey = c10::DispatchKey::Fake;

thread_local KeptResults::Call* current = nullptr;

// Whether all that an operator does is to return new tensors, the same for the same arguments.
bool may_be_kept(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto is_new_tensor = [](const c10::Argument& result) {
    return !result.alias_info() && result.type()->isSubtypeOf(*c10::TensorType::get());
  };
  return !schema.is_mutable() && !op.hasTag(at::Tag::nondeterministic_seeded) && !schema.returns().empty() &&
         std::all_of(schema.returns().begin(), schema.returns().end(), is_new_tensor);
}

struct Kind {
  std::string name;
  bool may_be_kept = false;
};
const Kind& kind_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Kind> known;
  const auto [at, is_new] = known.try_emplace(&op.schema());
  if (is_new) at->second = {.name = op.schema().name(), .may_be_kept = may_be_kept(op)};
  return at->second;
}

// The same memory, outside of any graph.
at::Tensor alias(const at::Tensor& tensor, const c10::VariableVersion& version) {
  return at::Tensor(
      tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(version, /*allow_tensor_metadata_change=*/true));
}

}  // namespace

void KeptResults::fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, std::vector<c10::IValue>* stack) {
  const auto compute = [&] {
    const c10::impl::ExcludeDispatchKeyGuard not_inside(kKey);
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
  };
  Call* const call = current;
  const Kind& kind = kind_of(op);
  if (!call || !kind.may_be_kept) return compute();
  const size_t number = call->next_++;
  const auto& schema = op.schema();
  if (!call->keep_ && call->results_.give(number, kind.name, *stack, schema.arguments().size())) return;
  compute();
  if (call->keep_ && (*call->keep_)(kind.name))
    call->results_.keep(number, kind.name, *stack, schema.returns().size(), call->keeper_);
}

void KeptResults::keep(size_t number, const std::string& operation, const std::vector<c10::IValue>& stack,
                       size_t results, Keeper* keeper) {
  Result& result = by_number_[number];
  result.operation = operation;
  const Keeping keeping(keeper);
  for (auto value = stack.end() - static_cast<std::ptrdiff_t>(results); value != stack.end(); ++value) {
    const at::Tensor& tensor = value->toTensor();
    result.tensors.emplace_back(
        tensor.defined() ? alias(tensor, tensor.unsafeGetTensorImpl()->version_counter()) : at::Tensor(),
        /*is_output=*/false);
  }
}

bool KeptResults::give(size_t number, const std::string& operation, std::vector<c10::IValue>& stack,
                       size_t arguments) const {
  const auto found = by_number_.find(number);
  if (found == by_number_.end()) return false;
  if (found->second.operation != operation)
    throw InvalidArgument(text("the function of activation_checkpoint() calls ", operation,
                               " in backward() where it called ", found->second.operation, " the first time"),
                          "It must compute the same both times");
  torch::jit::drop(stack, arguments);
  for (const auto& saved : found->second.tensors) {
    const at::Tensor tensor = saved.unpack();
    stack.emplace_back(tensor.defined() ? alias(tensor, 0) : at::Tensor());
  }
  return true;
}

KeptResults::Call::Call(KeptResults& results, const Policy* keep, Keeper* keeper)
    : results_(results), keep_(keep), keeper_(keeper), before_(std::exchange(current, this)), include_([] {
        static const torch::Library library = [] {
          torch::Library all(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
          all.fallback(torch::CppFunction::makeFromBoxedFunction<&KeptResults::fallback>());
          return all;
        }();
        return kKey;
      }()) {}
KeptResults::Call::~Call() { current = before_; }

}  // namespace muster::parallel
