#include "comm/backends/shm/shm_backend.h"

#include <unistd.h>

#include "base/text.h"
#include "comm/flatten.h"
#include "shm/arena.h"

namespace muster::comm::shm_backend {
namespace {

Bytes bytes_of(const at::Tensor& tensor) { return static_cast<Bytes>(tensor.mutable_data_ptr()); }

// One pointer a rank, from one tensor a rank or from one tensor for all.
template <typename Pointer>
std::vector<Pointer> parts(const std::vector<at::Tensor>& tensors, size_t ranks, size_t bytes_each) {
  std::vector<Pointer> pointers;
  if (tensors.empty()) return pointers;
  for (size_t r = 0; r < ranks; ++r)
    pointers.push_back(tensors.size() == 1 && ranks > 1 ? bytes_of(tensors[0]) + r * bytes_each : bytes_of(tensors[r]));
  return pointers;
}

// One side of an all_to_all: where each rank's part begins and how long it is.
template <typename Pointer>
void cut(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& splits, size_t ranks,
         std::vector<Pointer>& pointers, std::vector<uint64_t>& sizes) {
  if (tensors.size() == ranks && ranks > 1) {
    for (const auto& tensor : tensors) {
      pointers.push_back(bytes_of(tensor));
      sizes.push_back(tensor.nbytes());
    }
    return;
  }
  const at::Tensor& tensor = tensors[0];
  const auto total = static_cast<uint64_t>(tensor.nbytes());
  const uint64_t row = splits.empty() || tensor.size(0) == 0 ? 0 : total / static_cast<uint64_t>(tensor.size(0));
  Bytes at = bytes_of(tensor);
  for (size_t r = 0; r < ranks; ++r) {
    pointers.push_back(at);
    sizes.push_back(splits.empty() ? total / ranks : static_cast<uint64_t>(splits[r]) * row);
    at += sizes.back();
  }
}

ChannelOptions channel_options(const BackendContext& context) {
  return {.name = context.group_name,
          .heaps = context.heaps,
          .faults = context.faults,
          .spin = shm::spin_for(context.local_threads)};
}

}  // namespace

ShmBackend::ShmBackend(const BackendContext& context)
    : LaneBackend(context, "shm"),
      channel_(*context.store, context.store_prefix, context.rank, context.size, channel_options(context),
               context.watch, Deadline::after(context.timeout)),
      arena_(context.arena),
      pid_(::getpid()),
      on_leave_(context.on_leave),
      messages_(channel_) {}

ShmBackend::~ShmBackend() { leave({}); }

void ShmBackend::leave(const std::string& cause) {
  if (pid_ != ::getpid()) return;  // a fork: the membership is its parent's
  if (has_left_.exchange(true)) return;
  channel_.leave(cause);
  messages_.stop();
  stop_lane();
  if (on_leave_) on_leave_(this);
}

void ShmBackend::abort() {
  if (pid_ != ::getpid()) return;
  channel_.fail(Failure::kAborted, getRank(), text("rank ", getRank(), " aborted group '", channel_.name(), "'"));
}

uint64_t ShmBackend::heap_offset(const at::Tensor& tensor) const {
  const void* const data = tensor.const_data_ptr();
  return arena_ && tensor.nbytes() > 0 && arena_->contains(data) ? arena_->offset_of(data) : kNotOnHeap;
}

// --- messages ---

void ShmBackend::run_message(const Operation& operation, Deadline deadline) {
  Flatten flat;
  const at::Tensor tensor =
      operation.kind == OpKind::kSend ? flat.input(operation.tensor) : flat.output(operation.tensor);
  messages_.run(make_message(operation, tensor, deadline));
  flat.copy_back();
}

void ShmBackend::submit_message(const WorkPtr& work, Deadline deadline) {
  auto flat = std::make_shared<Flatten>();
  const Operation& operation = work->operations()[0];
  const at::Tensor tensor =
      operation.kind == OpKind::kSend ? flat->input(operation.tensor) : flat->output(operation.tensor);
  auto message = make_message(operation, tensor, deadline);
  message->on_complete = [this, work, flat, tensor](const Message& done) {
    std::exception_ptr error = done.error;
    try {
      if (!error) flat->copy_back();
    } catch (...) {
      error = std::current_exception();
    }
    if (!error) {
      count(work->operations()[0]);
      if (done.op == OpKind::kRecv) work->set_source(done.peer);
    }
    work->complete(std::move(error));
  };
  messages_.submit(message);
}

std::shared_ptr<Message> ShmBackend::make_message(const Operation& operation, const at::Tensor& tensor,
                                                  Deadline deadline) const {
  auto message = std::make_shared<Message>();
  message->op = operation.kind;
  message->peer = operation.peer;
  message->header.bytes = tensor.nbytes();
  message->header.tag = operation.tag;
  message->header.dtype = static_cast<uint8_t>(tensor.scalar_type());
  message->data = bytes_of(tensor);
  message->deadline = deadline;
  return message;
}

// --- collectives ---

void ShmBackend::execute(const Operation& operation, Deadline deadline, bool by_waiter) {
  try {
    channel_.set_caller(operation.site, by_waiter ? shm::kYield : std::chrono::nanoseconds(0));
    execute_on_bytes(operation, deadline);
  } catch (const std::exception& error) {
    // Whatever stops one rank in the middle (no memory, say) stops the group: the others would wait, or pair this
    // operation with the next.
    if (!channel_.failed())
      channel_.fail(Failure::kUnavailable, getRank(),
                    text("rank ", getRank(), " failed in ", to_string(operation.kind), ": ", error.what()));
    // A peer that has not noticed yet may still write into tensors on the heap: their memory must not become another's.
    const std::lock_guard lock(quarantine_mutex_);
    if (operation.tensor.defined() && arena_ && arena_->contains(operation.tensor.const_data_ptr()))
      quarantine_.push_back(operation.tensor);
    throw;
  }
}

void ShmBackend::execute_on_bytes(const Operation& operation, Deadline deadline) {
  const auto n = static_cast<size_t>(getSize());
  Flatten flat;
  Call call{.op = operation.kind,
            .part_of = operation.part_of,
            .redop = operation.op,
            .root = operation.peer,
            .deadline = deadline};
  const auto unit_is = [&](const at::Tensor& unit) {
    call.count = static_cast<size_t>(unit.numel());
    call.item = unit.element_size();
    call.dtype = static_cast<uint8_t>(unit.scalar_type());
  };
  const auto reduces = [&] { call.kernel = reduce_kernel(operation.tensor.scalar_type(), operation.op); };

  switch (operation.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce: {
      const bool written = operation.kind == OpKind::kAllReduce || getRank() == operation.peer;
      const at::Tensor tensor = written ? flat.in_place(operation.tensor) : flat.input(operation.tensor);
      unit_is(tensor);
      call.heap_offset = heap_offset(tensor);
      reduces();
      all_reduce(channel_, call, bytes_of(tensor));
      break;
    }
    case OpKind::kBroadcast: {
      const at::Tensor tensor =
          getRank() == operation.peer ? flat.input(operation.tensor) : flat.output(operation.tensor);
      unit_is(tensor);
      shm_backend::broadcast(channel_, call, bytes_of(tensor));
      break;
    }
    case OpKind::kAllGather:
    case OpKind::kGather: {
      const at::Tensor input = flat.input(operation.tensor);
      unit_is(input);
      const auto outputs = flat.outputs(operation.outputs);
      const auto pointers = parts<Bytes>(outputs, n, call.bytes());
      if (operation.kind == OpKind::kGather)
        shm_backend::gather(channel_, call, pointers, bytes_of(input));
      else
        all_gather(channel_, call, pointers, bytes_of(input));
      break;
    }
    case OpKind::kReduceScatter:
    case OpKind::kScatter: {
      const at::Tensor output = flat.output(operation.tensor);
      unit_is(output);
      const auto inputs = flat.inputs(operation.inputs);
      const auto pointers = parts<ConstBytes>(inputs, n, call.bytes());
      if (operation.kind == OpKind::kScatter) {
        shm_backend::scatter(channel_, call, bytes_of(output), pointers);
      } else {
        reduces();
        shm_backend::reduce_scatter(channel_, call, bytes_of(output), pointers);
      }
      break;
    }
    case OpKind::kAllToAll: {
      const auto inputs = flat.inputs(operation.inputs), outputs = flat.outputs(operation.outputs);
      unit_is(inputs[0]);
      call.count = 0;  // parts may differ; all_to_all compares them
      AllToAllParts parts;
      cut(inputs, operation.input_splits, n, parts.inputs, parts.send);
      cut(outputs, operation.output_splits, n, parts.outputs, parts.receive);
      all_to_all(channel_, call, parts);
      break;
    }
    case OpKind::kBarrier:
      shm_backend::barrier(channel_, call);
      break;
    case OpKind::kNothing:
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kAllReduceSparse:
      break;  // do not come here
  }
  flat.copy_back();
}

c10::intrusive_ptr<Backend> create(const BackendContext& context) { return c10::make_intrusive<ShmBackend>(context); }

std::string why_not() { return {}; }

}  // namespace muster::comm::shm_backend
