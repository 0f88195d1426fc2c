#include "comm/backends/shm/shm_backend.h"

#include <ATen/ops/empty_like.h>

#include "base/text.h"
#include "comm/validate.h"
#include "shm/arena.h"

namespace muster::comm::shm_backend {
namespace {

Bytes bytes_of(const at::Tensor& tensor) { return static_cast<Bytes>(tensor.mutable_data_ptr()); }

// The tensors of an operation as contiguous ones, and the way back for outputs that were not.
class Contiguous {
 public:
  at::Tensor input(const at::Tensor& tensor) { return tensor.is_contiguous() ? tensor : tensor.contiguous(); }
  // For tensors that are only written.
  at::Tensor output(const at::Tensor& tensor) {
    if (tensor.is_contiguous()) return tensor;
    at::Tensor flat = at::empty_like(tensor, at::MemoryFormat::Contiguous);
    back_.emplace_back(tensor, flat);
    return flat;
  }
  at::Tensor in_place(const at::Tensor& tensor) {
    if (tensor.is_contiguous()) return tensor;
    at::Tensor flat = tensor.contiguous();
    back_.emplace_back(tensor, flat);
    return flat;
  }
  void copy_back() {
    const at::NoGradGuard no_grad;
    for (const auto& [tensor, flat] : back_) tensor.copy_(flat);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;
};

// One pointer a rank, from one tensor a rank or from one tensor for all.
template <typename Pointer>
std::vector<Pointer> parts(const std::vector<at::Tensor>& tensors, size_t ranks, size_t bytes_each) {
  std::vector<Pointer> pointers;
  if (tensors.empty()) return pointers;
  for (size_t r = 0; r < ranks; ++r)
    pointers.push_back(tensors.size() == 1 && ranks > 1 ? bytes_of(tensors[0]) + r * bytes_each : bytes_of(tensors[r]));
  return pointers;
}

std::vector<uint64_t> part_bytes(const std::vector<int64_t>& splits, const at::Tensor& tensor, size_t ranks) {
  const auto total = static_cast<uint64_t>(tensor.nbytes());
  if (splits.empty()) return std::vector<uint64_t>(ranks, total / ranks);
  const uint64_t row = tensor.size(0) == 0 ? 0 : total / static_cast<uint64_t>(tensor.size(0));
  std::vector<uint64_t> bytes;
  for (const int64_t rows : splits) bytes.push_back(static_cast<uint64_t>(rows) * row);
  return bytes;
}

template <typename Pointer>
std::vector<Pointer> offsets(Bytes base, const std::vector<uint64_t>& sizes) {
  std::vector<Pointer> pointers;
  for (const uint64_t size : sizes) {
    pointers.push_back(base);
    base += size;
  }
  return pointers;
}

}  // namespace

// A collective or message under way. Waiting for it counts as time blocked in communication.
class ShmBackend::ShmWork final : public c10d::Work {
 public:
  ShmWork(int rank, std::shared_ptr<Counters> counters, Operation operation, c10d::OpType type)
      : c10d::Work(rank, type), counters_(std::move(counters)), operation_(std::move(operation)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    if (isCompleted() && !exception_) return true;
    const auto began = Clock::now();
    struct Account {
      Counters& counters;
      Clock::time_point began;
      ~Account() { counters.add_blocked(Clock::now() - began); }
    } account{*counters_, began};
    std::unique_lock lock(mutex_);
    const auto complete = [this] { return completed_; };
    if (timeout == kNoTimeout)
      cv_.wait(lock, complete);
    else if (!cv_.wait_for(lock, timeout, complete))
      return false;
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }
  std::vector<at::Tensor> result() override {
    return operation_.tensor.defined() ? std::vector{operation_.tensor} : operation_.outputs;
  }
  int sourceRank() const override { return operation_.kind == OpKind::kRecv ? operation_.peer : -1; }

  void complete(std::exception_ptr error = nullptr) { finish(std::move(error)); }
  const Operation& operation() const { return operation_; }

 private:
  const std::shared_ptr<Counters> counters_;  // not the backend: its threads must not be the last to let go of it
  const Operation operation_;
};

namespace {

ChannelOptions channel_options(const BackendContext& context) {
  ChannelOptions options{
      .name = context.group_name, .faults = context.faults, .spin = shm::spin_for(context.local_threads)};
  for (const auto& heap : context.heaps) options.heaps.push_back({heap});
  return options;
}

c10d::OpType c10d_type(const Operation& operation) {
  using c10d::OpType;
  static constexpr OpType kTypes[] = {OpType::ALLREDUCE,      OpType::BROADCAST, OpType::REDUCE,  OpType::ALLGATHER,
                                      OpType::REDUCE_SCATTER, OpType::GATHER,    OpType::SCATTER, OpType::ALLTOALL_BASE,
                                      OpType::BARRIER,        OpType::SEND,      OpType::RECV};
  return kTypes[static_cast<size_t>(operation.kind)];
}

bool is_message(const Operation& operation) {
  return operation.kind == OpKind::kSend || operation.kind == OpKind::kRecv;
}

}  // namespace

ShmBackend::ShmBackend(const BackendContext& context)
    : Backend(context.rank, context.size),
      channel_(*context.store, context.store_prefix, context.rank, context.size, channel_options(context),
               context.watch, Deadline::after(context.timeout)),
      arena_(context.arena),
      timeout_ms_(context.timeout.count()),
      messages_(channel_),
      lane_("muster-" + context.group_name) {}

ShmBackend::~ShmBackend() { leave({}); }

void ShmBackend::leave(const std::string& cause) {
  if (has_left_.exchange(true)) return;
  channel_.leave(cause);
  messages_.stop();
  lane_.stop();
}

void ShmBackend::abort() {
  channel_.fail(Failure::kAborted, getRank(), text("rank ", getRank(), " aborted group '", channel_.name(), "'"));
}

CommStats ShmBackend::stats() const {
  return {.operations = counters_->operations.load(std::memory_order_relaxed),
          .bytes = counters_->bytes.load(std::memory_order_relaxed),
          .blocked = std::chrono::nanoseconds(counters_->blocked_ns.load(std::memory_order_relaxed))};
}

void ShmBackend::count(const Operation& operation) {
  size_t bytes = operation.tensor.defined() ? operation.tensor.nbytes() : 0;
  if (operation.kind == OpKind::kAllToAll) bytes = operation.inputs[0].nbytes();
  counters_->operations.fetch_add(1, std::memory_order_relaxed);
  counters_->bytes.fetch_add(bytes, std::memory_order_relaxed);
}

Deadline ShmBackend::deadline_for(const Operation& operation) const {
  const auto own = operation.timeout;
  return Deadline::after(own.count() > 0 ? own
                                         : std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed)));
}

uint64_t ShmBackend::heap_offset(const void* data, size_t bytes) const {
  return arena_ && bytes > 0 && arena_->contains(data) ? arena_->offset_of(data) : kNotOnHeap;
}

void ShmBackend::run(const Operation& operation) {
  validate(operation);
  const Deadline deadline = deadline_for(operation);
  const auto began = Clock::now();
  if (is_message(operation)) {
    Contiguous flat;
    const at::Tensor tensor =
        operation.kind == OpKind::kSend ? flat.input(operation.tensor) : flat.output(operation.tensor);
    messages_.run(make_message(operation, tensor, deadline));
    flat.copy_back();
    count(operation);
  } else {
    std::exception_ptr error;
    lane_.run([&] {
      try {
        channel_.set_yield(shm::kYield);
        execute(operation, deadline);
      } catch (...) {
        error = std::current_exception();
      }
    });
    if (error) std::rethrow_exception(error);
  }
  counters_->add_blocked(Clock::now() - began);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::submit(Operation operation) {
  validate(operation);
  const Deadline deadline = deadline_for(operation);
  const auto type = c10d_type(operation);
  auto work = c10::make_intrusive<ShmWork>(getRank(), counters_, std::move(operation), type);
  if (is_message(work->operation())) {
    auto flat = std::make_shared<Contiguous>();
    const Operation& op = work->operation();
    const at::Tensor tensor = op.kind == OpKind::kSend ? flat->input(op.tensor) : flat->output(op.tensor);
    auto message = make_message(op, tensor, deadline);
    message->on_complete = [this, work, flat, tensor](std::exception_ptr error) {
      try {
        if (!error) flat->copy_back();
      } catch (...) {
        error = std::current_exception();
      }
      if (!error) count(work->operation());
      work->complete(std::move(error));
    };
    messages_.submit(message);
  } else {
    channel_.check();
    lane_.submit([this, work, deadline] {
      try {
        channel_.set_yield({});
        execute(work->operation(), deadline);
        work->complete();
      } catch (...) {
        work->complete(std::current_exception());
      }
    });
  }
  return work;
}

std::shared_ptr<Message> ShmBackend::make_message(const Operation& operation, const at::Tensor& tensor,
                                                  Deadline deadline) const {
  auto message = std::make_shared<Message>();
  message->op = operation.kind == OpKind::kSend ? Op::kSend : Op::kRecv;
  message->peer = operation.peer;
  message->header.bytes = tensor.nbytes();
  message->header.tag = operation.tag;
  message->header.dtype = static_cast<uint8_t>(tensor.scalar_type());
  message->data = bytes_of(tensor);
  message->deadline = deadline;
  return message;
}

void ShmBackend::execute(const Operation& operation, Deadline deadline) {
  try {
    execute_checked(operation, deadline);
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

void ShmBackend::execute_checked(const Operation& operation, Deadline deadline) {
  const auto n = static_cast<size_t>(getSize());
  Contiguous flat;
  Call call{.redop = operation.op, .root = operation.peer, .deadline = deadline};
  const auto fill = [&](Op op, const at::Tensor& unit) {
    call.op = op;
    call.count = static_cast<size_t>(unit.numel());
    call.item = unit.element_size();
    call.dtype = static_cast<uint8_t>(unit.scalar_type());
  };
  const auto reduces = [&] { call.kernel = reduce_kernel(operation.tensor.scalar_type(), operation.op); };
  const auto flat_list = [&](const std::vector<at::Tensor>& tensors, bool outputs) {
    std::vector<at::Tensor> list;
    for (const auto& tensor : tensors) list.push_back(outputs ? flat.output(tensor) : flat.input(tensor));
    return list;
  };

  switch (operation.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce: {
      const bool written = operation.kind == OpKind::kAllReduce || getRank() == operation.peer;
      const at::Tensor tensor = written ? flat.in_place(operation.tensor) : flat.input(operation.tensor);
      fill(operation.kind == OpKind::kReduce ? Op::kReduce : Op::kAllReduce, tensor);
      call.heap_offset = heap_offset(tensor.const_data_ptr(), tensor.nbytes());
      reduces();
      all_reduce(channel_, call, bytes_of(tensor));
      break;
    }
    case OpKind::kBroadcast: {
      const at::Tensor tensor =
          getRank() == operation.peer ? flat.input(operation.tensor) : flat.output(operation.tensor);
      fill(Op::kBroadcast, tensor);
      shm_backend::broadcast(channel_, call, bytes_of(tensor));
      break;
    }
    case OpKind::kAllGather:
    case OpKind::kGather: {
      const at::Tensor input = flat.input(operation.tensor);
      fill(operation.kind == OpKind::kGather ? Op::kGather : Op::kAllGather, input);
      const auto outputs = flat_list(operation.outputs, true);
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
      fill(operation.kind == OpKind::kScatter ? Op::kScatter : Op::kReduceScatter, output);
      const auto inputs = flat_list(operation.inputs, false);
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
      const at::Tensor input = flat.input(operation.inputs[0]), output = flat.output(operation.outputs[0]);
      fill(Op::kAllToAll, input);
      call.count = 0;  // parts may differ; all_to_all compares them
      AllToAllParts parts;
      parts.send = part_bytes(operation.input_splits, input, n);
      parts.receive = part_bytes(operation.output_splits, output, n);
      parts.inputs = offsets<ConstBytes>(bytes_of(input), parts.send);
      parts.outputs = offsets<Bytes>(bytes_of(output), parts.receive);
      all_to_all(channel_, call, parts);
      break;
    }
    case OpKind::kBarrier:
      call.op = Op::kBarrier;
      shm_backend::barrier(channel_, call);
      break;
    case OpKind::kSend:
    case OpKind::kRecv:
      break;  // messages do not come here
  }
  flat.copy_back();
  count(operation);
}

void ShmBackend::validate(const Operation& operation) const { comm::validate(operation, getRank(), getSize(), "shm"); }

c10::intrusive_ptr<Backend> create(const BackendContext& context) { return c10::make_intrusive<ShmBackend>(context); }

std::string why_not() { return {}; }

}  // namespace muster::comm::shm_backend
