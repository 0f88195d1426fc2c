#include "comm/backends/shm/shm_backend.h"

#include <numeric>

#include "base/text.h"
#include "comm/kit/failure_note.h"
#include "comm/kit/tensor_bytes.h"
#include "shm/arena.h"

namespace muster::comm::shm_backend {
namespace {

ChannelOptions channel_options(const BackendContext& context, const FaultInjector& faults) {
  std::vector<pid_t> pids;
  for (const Member& member : context.group.members) pids.push_back(member.pid);
  return {.name = context.group.name,
          .heaps = context.host.heaps,
          .faults = &faults,
          .spin = shm::spin_for(context.host.local_ranks, context.host.cores),
          .shown_ranks = context.group.shown_ranks,
          .pids = std::move(pids),
          .board = context.options.board};
}

}  // namespace

ShmBackend::ShmBackend(const BackendContext& context)
    : QueuedBackend(context, "shm"),
      channel_(*context.group.store, context.group.store_prefix, context.group.rank, context.group.size,
               channel_options(context, faults()), context.host.watch, Deadline::after(context.group.timeout)),
      arena_(context.host.arena),
      messages_(channel_, [this] { return memory(); }) {}

ShmBackend::~ShmBackend() { leave({}); }

void ShmBackend::fail_group(const Error& cause) {
  const FailureReport failure = failure_of(cause, shown(getRank()));
  channel_.fail(failure.code, failure.subject, failure.what, failure.missing, failure.pid, failure.finder,
                failure.advice);
}

uint64_t ShmBackend::heap_offset(ConstBytes data, size_t bytes) const {
  return arena_ && bytes > 0 && arena_->contains(data) ? arena_->offset_of(data) : kNotOnHeap;
}

// --- messages ---

void ShmBackend::run_message(const Operation& operation, Deadline deadline) {
  Flatten flat;
  const at::Tensor tensor =
      operation.kind == OpKind::kSend ? flat.input(operation.tensor) : flat.output(operation.tensor);
  const auto message = make_message(operation, tensor, deadline);
  try {
    messages_.run(message);
  } catch (...) {
    retire_posted(*message);
    throw;
  }
  flat.copy_back();
}

// The sender of a receive that failed may not have noticed the failure yet, and still write to the posted tensor. As in
// execute(), its memory is not given to another tensor.
void ShmBackend::retire_posted(const Message& receive) const {
  if (receive.posted && arena_) arena_->retire(receive.data);
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
  message->on_complete = [this, work, flat, tensor](const Message& done, Message::Call call) {
    if (call == Message::Call::kCallbacks) {
      work->mark_future();
      return false;
    }
    std::exception_ptr error = done.error;
    if (error) retire_posted(done);
    try {
      if (!error) flat->copy_back();
    } catch (...) {
      error = std::current_exception();
    }
    if (!error) {
      count(work->operations()[0]);
      if (done.op == OpKind::kRecv) work->set_source(done.peer);
    }
    return work->end(std::move(error));
  };
  // Neither keeps the message, which keeps the work, nor the backend, whose end completes the work.
  work->set_mover(
      [this, memory = std::weak_ptr<void>(memory()), moved = std::weak_ptr<Message>(message), peer = message->peer] {
        const auto alive = memory.lock();
        const auto pending = moved.lock();
        if (!alive || !pending) return;
        check_fork();
        messages_.move_until(*pending, peer);
      });
  submit(message);
}

std::shared_ptr<Message> ShmBackend::make_message(const Operation& operation, const at::Tensor& tensor,
                                                  Deadline deadline) const {
  auto message = std::make_shared<Message>();
  message->op = operation.kind;
  message->peer = operation.peer;
  message->header.bytes = tensor.nbytes();
  message->header.tag = operation.tag;
  if (channel_.heap_bytes(getRank()) > 0) message->header.place = heap_offset(data_of(tensor), tensor.nbytes());
  message->header.dtype = static_cast<uint8_t>(tensor.scalar_type());
  message->data = data_of(tensor);
  message->deadline = deadline;
  message->site = operation.site;
  return message;
}

// --- collectives ---

void ShmBackend::require_possible(const Operation& operation) const {
  constexpr size_t kMost = (kSlotPayload + kSlotTables) / (2 * sizeof(uint64_t));  // the tables of so many fit a slot
  if (operation.kind == OpKind::kAllToAll && static_cast<size_t>(getSize()) > kMost)
    throw InvalidArgument(
        text("all_to_all: expected a group of at most ", kMost, " ranks on one host, got ", getSize()),
        "Use smaller groups, or messages");
}

void ShmBackend::execute(const Operation& operation, Deadline deadline, bool by_waiter) {
  const uint64_t last = channel_.seq();
  try {
    channel_.set_caller(operation.site, by_waiter ? shm::kYield : std::chrono::nanoseconds(0));
    run_on_bytes(operation, getRank(), getSize(), deadline, [this](ByteCall& call) {
      call.heap_offset = contribution_on_heap(call);
      execute_call(call);
    });
  } catch (const std::exception& error) {
    // An error that stops one rank in the middle (for example, no memory) stops the group: the others would wait, or
    // pair this operation with the next.
    if (!channel_.failed())
      channel_.fail(ErrorCode::kUnavailable, shown(getRank()),
                    text("rank ", shown(getRank()), " failed in ", to_string(operation.kind), ": ", error.what()));
    // A peer that has not noticed the failure yet may still write to the tensor of an all_reduce or reduce on the heap,
    // if this rank has announced it. Its memory must not be given to another tensor, even when this group is gone: the
    // heap outlives it.
    const bool peers_write = operation.kind == OpKind::kAllReduce || operation.kind == OpKind::kReduce;
    if (peers_write && channel_.seq() != last && arena_) arena_->retire(operation.tensor.const_data_ptr());
    throw;
  }
}

// Returns false for every call that is not certainly valid. The caller then takes the long way, which validates.
bool ShmBackend::run_small(const SmallCall& small) {
  if (is_message(small.kind)) return run_small_message(small);
  SmallByteCall bytes(small, getSize());
  if (!bytes.valid()) return false;
  Call& call = bytes.call();
  if (bytes.contribution() > kSlotPayload) return false;
  if (2 * call.send.size() * sizeof(uint64_t) > kSlotTables) return false;  // an all_to_all sends two tables with them
  return run_framed(small, bytes.dtype(), bytes.payload(), [&](Deadline deadline) {
    call.deadline = deadline;
    channel_.set_caller(small.site, shm::kYield);
    execute_call(call);
  });
}

bool ShmBackend::run_small_message(const SmallCall& small) {
  const at::Tensor& tensor = *small.tensor;
  if (!plain(tensor) || small.peer < 0 || small.peer >= getSize()) return false;
  const at::ScalarType dtype = tensor.scalar_type();
  const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
  if (bytes > Messages::kSmall) return false;
  Bytes const data = data_of(tensor);
  const MessageHeader header{.bytes = bytes, .tag = small.tag, .dtype = static_cast<uint8_t>(dtype)};
  return run_message_framed(small, dtype, bytes, [&](const auto& waits, const auto& ends) {
    if (small.kind == OpKind::kSend) return messages_.send_now(small.peer, header, data, small.site, ends);
    return messages_.receive_now(small.peer, header, data, timeout_for(small.timeout), small.site, waits, ends);
  });
}

// Where this rank's contribution lies on its heap. Peers read it there while this rank writes its output:
// run_on_bytes() has seen to it that the two are different memory, except for the part of the input that no peer reads.
uint64_t ShmBackend::contribution_on_heap(const ByteCall& call) const {
  switch (call.kind) {
    case OpKind::kReduceScatter:
    case OpKind::kScatter:
      return call.one_piece ? heap_offset(call.inputs[0], call.bytes() * call.inputs.size()) : kNotOnHeap;
    case OpKind::kAllToAll:
      return call.one_piece ? heap_offset(call.inputs[0], std::reduce(call.send.begin(), call.send.end())) : kNotOnHeap;
    default:
      return heap_offset(call.data, call.bytes());
  }
}

void ShmBackend::execute_call(const Call& call) {
  switch (call.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      return all_reduce(channel_, call);
    case OpKind::kBroadcast:
      return shm_backend::broadcast(channel_, call);
    case OpKind::kAllGather:
    case OpKind::kGather:
      return all_gather(channel_, call);
    case OpKind::kReduceScatter:
      return shm_backend::reduce_scatter(channel_, call);
    case OpKind::kScatter:
      return shm_backend::scatter(channel_, call);
    case OpKind::kAllToAll:
      return all_to_all(channel_, call);
    case OpKind::kScan:
      return scan(channel_, call);
    default:
      return shm_backend::barrier(channel_, call);
  }
}

c10::intrusive_ptr<Backend> create(const BackendContext& context) { return c10::make_intrusive<ShmBackend>(context); }

std::string unavailable_reason() { return {}; }

}  // namespace muster::comm::shm_backend
