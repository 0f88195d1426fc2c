#include "muster/optim/autocast.h"

#include <ATen/autocast_mode.h>
#include <c10/core/Device.h>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster {
namespace {

c10::DeviceType checked(c10::DeviceType device, c10::ScalarType dtype) {
  if (dtype != c10::kBFloat16 && dtype != c10::kHalf)
    throw InvalidArgument(text("Autocast: expected BFloat16 or Half, got ", c10::toString(dtype)),
                          "Use torch::kBFloat16 or torch::kHalf");
  if (!at::autocast::is_autocast_available(device))
    throw InvalidArgument(text("there is no autocast for devices of type ", c10::DeviceTypeName(device, true)),
                          "Use torch::kCPU or torch::kCUDA");
  return device;
}

}  // namespace

Autocast::Autocast(c10::ScalarType dtype, c10::DeviceType device, bool enabled)
    : device_(checked(device, dtype)),
      enabled_before_(at::autocast::is_autocast_enabled(device)),
      dtype_before_(at::autocast::get_autocast_dtype(device)) {
  if (dtype != dtype_before_) at::autocast::clear_cache();  // which does not know the dtype
  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  const bool is_outermost = at::autocast::decrement_nesting() == 0;
  if (is_outermost || at::autocast::get_autocast_dtype(device_) != dtype_before_) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, enabled_before_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
}

}  // namespace muster
