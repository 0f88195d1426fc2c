#include "muster/parallel/on_meta.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstddef>
#include <optional>

namespace muster {
namespace {

// libtorch keeps this key for modes as this one. Only this file uses it.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() != "device") continue;
    c10::IValue& device = torch::jit::peek(*stack, i, arguments.size());
    // Of zeros_like() and the like, the device is that of another tensor.
    if (device.isNone() && !arguments[0].type()->isSubtypeOf(*c10::TensorType::get())) device = c10::Device(c10::kMeta);
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

void require_fallback() {
  static const torch::Library library = [] {
    torch::Library fallback(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    fallback.fallback(torch::CppFunction::makeFromBoxedFunction<&call>());
    return fallback;
  }();
}

}  // namespace

struct OnMeta::Impl {
  c10::impl::IncludeDispatchKeyGuard include{kKey};
};

OnMeta::OnMeta() {
  require_fallback();
  impl_ = std::make_unique<Impl>();
}
OnMeta::~OnMeta() = default;

}  // namespace muster
