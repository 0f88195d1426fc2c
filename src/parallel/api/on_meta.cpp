#include "muster/parallel/on_meta.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstddef>
#include <memory>

#include "parallel/kit/every_operator.h"

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
  parallel::go_on_after(kKey, op, keys, stack);
}

}  // namespace

struct OnMeta::Impl {
  c10::impl::IncludeDispatchKeyGuard include{kKey};
};

OnMeta::OnMeta() {
  parallel::bring_every_operator_to<kKey, &call>();
  impl_ = std::make_unique<Impl>();
}
OnMeta::~OnMeta() = default;

}  // namespace muster
