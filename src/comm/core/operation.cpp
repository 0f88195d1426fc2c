#include "comm/core/operation.h"

namespace muster::comm {

CallDescriptor descriptor_of(const Operation& operation) {
  if (operation.announced) return *operation.announced;
  CallDescriptor call{.root = static_cast<uint32_t>(operation.peer),
                      .op = operation.kind,
                      .redop = static_cast<uint8_t>(operation.op),
                      .part_of = operation.part_of};
  const at::Tensor& unit = operation.kind == OpKind::kAllToAll ? operation.inputs[0] : operation.tensor;
  if (unit.defined()) {
    call.dtype = static_cast<uint8_t>(unit.scalar_type());
    if (operation.kind != OpKind::kAllToAll) call.count = static_cast<uint64_t>(unit.numel());
  }
  return call;
}

Payload message_payload(const Operation& message) {
  return {message.tensor.nbytes(), static_cast<uint8_t>(message.tensor.scalar_type())};
}

}  // namespace muster::comm
