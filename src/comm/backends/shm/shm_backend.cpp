#include "comm/backends/shm/shm_backend.h"

#include <array>

#include "base/text.h"
#include "base/thread.h"
#include "comm/byte_parts.h"
#include "comm/flatten.h"
#include "shm/arena.h"

namespace muster::comm::shm_backend {
namespace {

ChannelOptions channel_options(const BackendContext& context) {
  std::vector<pid_t> pids;
  for (const Member& member : context.members) pids.push_back(member.pid);
  return {.name = context.group_name,
          .heaps = context.heaps,
          .faults = context.faults,
          .spin = shm::spin_for(context.local_threads, context.cores),
          .shown_ranks = context.shown_ranks,
          .pids = std::move(pids),
          .board = context.board};
}

}  // namespace

ShmBackend::ShmBackend(const BackendContext& context)
    : LaneBackend(context, "shm"),
      channel_(*context.store, context.store_prefix, context.rank, context.size, channel_options(context),
               context.watch, Deadline::after(context.timeout)),
      arena_(context.arena),
      messages_(channel_, [this] { return memory(); }) {}

ShmBackend::~ShmBackend() { leave({}); }

void ShmBackend::leave(const std::string& cause) {
  if (in_fork()) return;
  if (has_left_.exchange(true)) return;
  const WithoutInterpreterLock unlocked;
  channel_.leave(cause);
  messages_.stop();
  end_membership();
}

void ShmBackend::fail(const Error& cause) {
  if (in_fork()) return;
  int subject = shown(getRank()), pid = 0;
  std::vector<int> missing;
  Failure reason = Failure::kUnavailable;
  switch (cause.code()) {
    case ErrorCode::kPeerLost: {
      const auto& lost = dynamic_cast<const PeerLost&>(cause);
      reason = Failure::kPeerLost, subject = lost.rank(), pid = lost.pid();
      break;
    }
    case ErrorCode::kTimeout:
      reason = Failure::kTimeout, missing = dynamic_cast<const Timeout&>(cause).missing();
      break;
    case ErrorCode::kMismatch:
      reason = Failure::kMismatch;
      break;
    case ErrorCode::kAborted:
      reason = Failure::kAborted;
      break;
    default:
      break;
  }
  channel_.fail(reason, subject, cause.message(), missing, pid);
}

uint64_t ShmBackend::heap_offset(const at::Tensor& tensor) const {
  const void* const data = data_of(tensor);  // not const_data_ptr(): a lazy copy gets its own memory only now
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
  submit_to(work, deadline, [this](const auto& message) { messages_.submit(message); });
}

Backend::Taken ShmBackend::take_message(const Operation& receive, int from) {
  const bool all_gone = messages_.all_left();  // first, so that find() finds all that they have sent
  if (messages_.find(receive.tag, from) == kAnySource) return {.all_gone = all_gone};
  WorkPtr work = make_message_work(receive);
  Taken taken;
  submit_to(work, deadline_for(receive.timeout), [&](const auto& message) {
    if (const int source = messages_.submit_if_here(message, from); source != kAnySource)
      taken = {.work = work, .source = source};
  });
  return taken;
}

void ShmBackend::submit_to(const WorkPtr& work, Deadline deadline,
                           const std::function<void(std::shared_ptr<Message>)>& submit) {
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
  submit(message);
}

std::shared_ptr<Message> ShmBackend::make_message(const Operation& operation, const at::Tensor& tensor,
                                                  Deadline deadline) const {
  auto message = std::make_shared<Message>();
  message->op = operation.kind;
  message->peer = operation.peer;
  message->header.bytes = tensor.nbytes();
  message->header.tag = operation.tag;
  if (operation.kind == OpKind::kSend && channel_.heap_bytes(getRank()) > 0)
    message->header.place = heap_offset(tensor);
  message->header.dtype = static_cast<uint8_t>(tensor.scalar_type());
  message->data = data_of(tensor);
  message->deadline = deadline;
  message->site = operation.site;
  return message;
}

// --- collectives ---

void ShmBackend::execute(const Operation& operation, Deadline deadline, bool by_waiter) {
  try {
    channel_.set_caller(operation.site, by_waiter ? shm::kYield : std::chrono::nanoseconds(0));
    execute_on_bytes(operation, deadline);
  } catch (const std::exception& error) {
    // An error that stops one rank in the middle (for example, no memory) stops the group: the others would wait, or
    // pair this operation with the next.
    if (!channel_.failed())
      channel_.fail(Failure::kUnavailable, shown(getRank()),
                    text("rank ", shown(getRank()), " failed in ", to_string(operation.kind), ": ", error.what()));
    // A peer that has not noticed the failure yet may still write to tensors on the heap, so this keeps the tensor: its
    // memory must not be given to another one.
    const std::lock_guard lock(quarantine_mutex_);
    if (operation.tensor.defined() && arena_ && arena_->contains(operation.tensor.const_data_ptr())) {
      quarantine_.push_back(operation.tensor);
      if (for_pytorch_) (void)new at::Tensor(operation.tensor);  // leaked: the heap is the process's, not the group's
    }
    throw;
  }
}

namespace {

// Whether a tensor's bytes are its elements in order. Almost all tensors are like that.
bool plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu() && tensor.is_contiguous() &&
         !tensor.is_neg() && !tensor.is_conj();
}

}  // namespace

// Returns false for every call that is not certainly valid. The caller then takes the long way, which validates.
bool ShmBackend::run_small(const SmallCall& small) {
  static constexpr size_t kMost = 64;  // ranks
  const auto n = static_cast<size_t>(getSize());
  Call call{.op = small.kind, .redop = small.op, .root = small.peer};
  const at::Tensor* const tensor = small.tensor;
  at::ScalarType dtype = at::kByte;
  if (small.kind == OpKind::kNothing) return false;
  if (small.kind != OpKind::kBarrier) {
    if (n > kMost || !tensor || !plain(*tensor) || (small.other && !plain(*small.other))) return false;
    dtype = tensor->scalar_type();
    call.count = static_cast<size_t>(tensor->numel());
    call.item = tensor->element_size();
    call.dtype = static_cast<uint8_t>(dtype);
    if (small.peer < 0 || small.peer >= getSize()) return false;
  }
  if (is_message(small.kind)) {
    if (call.bytes() > Messages::kSmall) return false;
    const MessageHeader header{.bytes = call.bytes(), .tag = small.tag, .dtype = call.dtype};
    return run_message_framed(small, dtype, call.bytes(), [&] {
      if (small.kind == OpKind::kSend) return messages_.send_now(small.peer, header, data_of(*tensor), small.site);
      return messages_.receive_now(small.peer, header, data_of(*tensor), timeout_for(small.timeout), small.site);
    });
  }
  const bool reduces =
      small.kind == OpKind::kAllReduce || small.kind == OpKind::kReduce || small.kind == OpKind::kReduceScatter;
  if (reduces) {
    call.kernel = small.op == ReduceOp::PREMUL_SUM ? nullptr : reduce_kernel(dtype, small.op);
    if (!call.kernel) return false;
  }
  size_t contribution = call.bytes();
  if (small.other) {
    const bool parts_here =
        small.kind == OpKind::kAllToAll;  // `tensor` has all parts, not one; two tables are sent with them
    if (small.other->scalar_type() != dtype) return false;
    if (parts_here) {
      if (call.count % n != 0 || (tensor->dim() > 0 && tensor->size(0) % getSize() != 0) ||
          small.other->sizes() != tensor->sizes())
        return false;
      if (2 * n * sizeof(uint64_t) > kSlotTables) return false;
    } else if (static_cast<size_t>(small.other->numel()) != call.count * n) {
      return false;
    }
    if (small.kind == OpKind::kReduceScatter) contribution *= n;
  }
  if (contribution > kSlotPayload) return false;

  const auto run = [&](Deadline deadline) {
    call.deadline = deadline;
    channel_.set_caller(small.site, shm::kYield);
    const auto each = [&](Bytes data, size_t bytes, auto& pointers) {
      for (size_t r = 0; r < n; ++r) pointers[r] = data + r * bytes;
    };
    switch (small.kind) {
      case OpKind::kAllReduce:
      case OpKind::kReduce:
        return all_reduce(channel_, call, data_of(*tensor));
      case OpKind::kBroadcast:
        return shm_backend::broadcast(channel_, call, data_of(*tensor));
      case OpKind::kAllGather: {
        std::array<Bytes, kMost> outputs;
        each(data_of(*small.other), call.bytes(), outputs);
        return all_gather(channel_, call, std::span(outputs).first(n), data_of(*tensor));
      }
      case OpKind::kReduceScatter: {
        std::array<ConstBytes, kMost> inputs;
        each(data_of(*small.other), call.bytes(), inputs);
        return shm_backend::reduce_scatter(channel_, call, data_of(*tensor), std::span(inputs).first(n));
      }
      case OpKind::kAllToAll: {
        std::array<Bytes, kMost> outputs;
        std::array<ConstBytes, kMost> inputs;
        std::array<uint64_t, kMost> sizes;
        const size_t part = call.bytes() / n;
        each(data_of(*tensor), part, outputs);
        each(data_of(*small.other), part, inputs);
        std::fill_n(sizes.begin(), n, part);
        call.count = 0;
        const std::span<const uint64_t> all_sizes = std::span(sizes).first(n);
        return all_to_all(channel_, call,
                          {.inputs = std::span(inputs).first(n),
                           .outputs = std::span(outputs).first(n),
                           .send = all_sizes,
                           .receive = all_sizes});
      }
      default:
        return shm_backend::barrier(channel_, call);
    }
  };
  return run_framed(small, dtype, call.bytes(), run);
}

void ShmBackend::execute_on_bytes(const Operation& operation, Deadline deadline) {
  const auto n = static_cast<size_t>(getSize());
  Flatten flat;
  Call call{.op = operation.kind,
            .part_of = operation.part_of,
            .redop = operation.op,
            .root = operation.peer,
            .deadline = deadline,
            .announced = operation.announced ? &*operation.announced : nullptr};
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
      all_reduce(channel_, call, data_of(tensor));
      break;
    }
    case OpKind::kBroadcast: {
      const at::Tensor tensor =
          getRank() == operation.peer ? flat.input(operation.tensor) : flat.output(operation.tensor);
      unit_is(tensor);
      call.heap_offset = heap_offset(tensor);
      shm_backend::broadcast(channel_, call, data_of(tensor));
      break;
    }
    case OpKind::kAllGather:
    case OpKind::kGather: {
      const at::Tensor input = flat.input(operation.tensor);
      unit_is(input);
      call.heap_offset = heap_offset(input);
      const auto outputs = flat.outputs(operation.outputs);
      const auto pointers = parts_of<Bytes>(outputs, n, call.bytes());
      if (operation.kind == OpKind::kGather)
        shm_backend::gather(channel_, call, pointers, data_of(input));
      else
        all_gather(channel_, call, pointers, data_of(input));
      break;
    }
    case OpKind::kReduceScatter:
    case OpKind::kScatter: {
      const at::Tensor output = flat.output(operation.tensor);
      unit_is(output);
      const auto inputs = flat.inputs(operation.inputs);
      if (inputs.size() == 1) call.heap_offset = heap_offset(inputs[0]);
      const auto pointers = parts_of<ConstBytes>(inputs, n, call.bytes());
      if (operation.kind == OpKind::kScatter) {
        shm_backend::scatter(channel_, call, data_of(output), pointers);
      } else {
        reduces();
        shm_backend::reduce_scatter(channel_, call, data_of(output), pointers);
      }
      break;
    }
    case OpKind::kAllToAll: {
      const auto inputs = flat.inputs(operation.inputs), outputs = flat.outputs(operation.outputs);
      unit_is(inputs[0]);
      call.count = 0;  // parts may differ; all_to_all compares them
      // Peers read the input on the heap while this rank writes its output, so the two must be different memory.
      if (inputs.size() == 1 && outputs.size() == 1 && !outputs[0].is_alias_of(inputs[0]))
        call.heap_offset = heap_offset(inputs[0]);
      std::vector<ConstBytes> from;
      std::vector<Bytes> to;
      std::vector<uint64_t> send, receive;
      cut(inputs, operation.input_splits, n, from, send);
      cut(outputs, operation.output_splits, n, to, receive);
      all_to_all(channel_, call, {.inputs = from, .outputs = to, .send = send, .receive = receive});
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
