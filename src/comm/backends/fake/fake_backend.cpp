#include "comm/backends/fake/fake_backend.h"

#include "base/text.h"
#include "comm/byte_parts.h"
#include "comm/failure_note.h"
#include "comm/flatten.h"

namespace muster::comm::fake_backend {

void FakeBackend::leave(const std::string&) {
  if (in_fork()) return;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(has_left_, true)) return;
    if (!failure_)
      failure_ = std::make_exception_ptr(Aborted(text("group '", group_name(), "' is closing on rank ", getRank())));
  }
  end_membership();
}

void FakeBackend::fail(const Error& cause) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = read_failure(write_failure(cause));
}

void FakeBackend::check() const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void FakeBackend::execute(const Operation& operation, Deadline, bool) {
  check();
  ++sequence_;
  const auto n = static_cast<size_t>(getSize()), me = static_cast<size_t>(getRank());
  Flatten flat;
  switch (operation.kind) {
    case OpKind::kAllGather:
    case OpKind::kGather: {
      const at::Tensor input = flat.input(operation.tensor);
      for (Bytes const output : parts_of<Bytes>(flat.outputs(operation.outputs), n, input.nbytes()))
        copy_bytes(output, data_of(input), input.nbytes());
      break;
    }
    case OpKind::kReduceScatter:
    case OpKind::kScatter: {
      const at::Tensor output = flat.output(operation.tensor);
      const auto inputs = parts_of<ConstBytes>(flat.inputs(operation.inputs), n, output.nbytes());
      if (!inputs.empty()) copy_bytes(data_of(output), inputs[me], output.nbytes());
      break;
    }
    case OpKind::kAllToAll: {
      const auto inputs = flat.inputs(operation.inputs), outputs = flat.outputs(operation.outputs);
      std::vector<ConstBytes> from;
      std::vector<Bytes> to;
      std::vector<uint64_t> sizes, room;
      cut(inputs, operation.input_splits, n, from, sizes);
      cut(outputs, operation.output_splits, n, to, room);
      for (size_t r = 0; r < n; ++r) copy_bytes(to[r], from[me], std::min(sizes[me], room[r]));
      break;
    }
    default:
      break;  // the tensors already hold the results
  }
  flat.copy_back();
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
std::string why_not() { return {}; }

}  // namespace muster::comm::fake_backend
