#include "comm/backends/fake/fake_backend.h"

#include <algorithm>

#include "base/copy.h"
#include "base/text.h"
#include "comm/kit/failure_note.h"
#include "comm/kit/tensor_bytes.h"

namespace muster::comm::fake_backend {

void FakeBackend::leave_group(const std::string&) {
  const std::lock_guard lock(mutex_);
  if (!failure_)
    failure_ =
        std::make_exception_ptr(Aborted(text("group '", group_name(), "' is closing on rank ", shown(getRank()))));
}

void FakeBackend::fail_group(const Error& cause) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = error_of(failure_of(cause, shown(getRank())), shown(getRank()), last_operation());
}

bool FakeBackend::failed() const {
  const std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

void FakeBackend::check() const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void FakeBackend::execute(const Operation& operation, Deadline deadline, bool) {
  check();
  set_last_operation(operation.kind, sequence_++);
  switch (operation.kind) {
    case OpKind::kAllGather:
    case OpKind::kGather:
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll:
      break;
    case OpKind::kScatter:
      if (operation.inputs.empty()) return;  // another rank's data would come here
      break;
    default:
      return;  // the tensors already hold the results
  }
  run_on_bytes(operation, getRank(), getSize(), deadline, [me = static_cast<size_t>(getRank())](const ByteCall& call) {
    switch (call.kind) {
      case OpKind::kAllGather:
      case OpKind::kGather:
        for (Bytes const output : call.outputs) copy_bytes(output, call.data, call.bytes());
        break;
      case OpKind::kReduceScatter:
      case OpKind::kScatter:
        copy_bytes(call.data, call.inputs[me], call.bytes());
        break;
      case OpKind::kAllToAll:
        for (size_t r = 0; r < call.outputs.size(); ++r)
          copy_bytes(call.outputs[r], call.inputs[me], std::min(call.send[me], call.receive[r]));
        break;
      default:
        break;
    }
  });
}

void FakeBackend::run_message(const Operation&, Deadline) { check(); }

void FakeBackend::submit_message(const WorkPtr& work, Deadline) {
  check();
  const Operation& operation = work->operations()[0];
  count(operation);
  if (operation.kind == OpKind::kRecv) work->set_source(operation.peer == kAnySource ? 0 : operation.peer);
  work->complete();
}

c10::intrusive_ptr<Backend> create(const BackendContext& context) { return c10::make_intrusive<FakeBackend>(context); }
std::string unavailable_reason() { return {}; }

}  // namespace muster::comm::fake_backend
