#include "comm/kit/queued_backend.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <unistd.h>

#include <algorithm>

#include "base/text.h"
#include "comm/kit/validate.h"
#include "muster/base/error.h"

namespace muster::comm {
namespace {

bool unequal(const std::vector<at::Tensor>& parts) {
  return std::any_of(parts.begin(), parts.end(), [&](const auto& part) { return part.numel() != parts[0].numel(); });
}

// An operation that is part of another.
Operation part(const Operation& whole, OpKind kind, const at::Tensor& tensor, int peer) {
  return {.kind = kind,
          .op = whole.op,
          .peer = peer,
          .tensor = tensor,
          .timeout = whole.timeout,
          .part_of = whole.kind,
          .announced = whole.announced,
          .site = whole.site};
}

// The result has the tensor's dtype, even if the factor has a wider one.
at::Tensor scaled(const Operation& operation, const at::Tensor& tensor) {
  return (operation.factor_tensor.defined() ? at::mul(tensor, operation.factor_tensor)
                                            : at::mul(tensor, operation.factor))
      .to(tensor.scalar_type());
}

// Each rank's tensor times its factor. Only what the operation writes anyway is changed in place.
Operation premultiplied(const Operation& operation, int rank) {
  const at::NoGradGuard no_grad;
  Operation sum = operation;
  if (operation.kind == OpKind::kReduceScatter)
    for (auto& input : sum.inputs) input = scaled(operation, input);
  else if (operation.kind == OpKind::kReduce && rank != operation.peer)
    sum.tensor = scaled(operation, operation.tensor);
  else if (operation.factor_tensor.defined())
    at::Tensor(sum.tensor).mul_(operation.factor_tensor);
  else
    at::Tensor(sum.tensor).mul_(operation.factor);
  return sum;
}

}  // namespace

QueuedBackend::QueuedBackend(const BackendContext& context, std::string name)
    : Backend(context.group.rank, context.group.size),
      name_(context.options.for_pytorch ? "muster" : std::move(name)),
      group_name_(context.group.name),
      shown_ranks_(context.group.shown_ranks),
      on_leave_(context.options.on_leave),
      pid_(::getpid()),
      timeout_ms_(context.group.timeout.count()),
      queue_(std::make_shared<CollectiveQueue>("muster-" + context.group.name)),
      black_box_(context.host.black_box) {
  for_pytorch_ = context.options.for_pytorch;
  if (!black_box_) return;
  static const std::vector<std::string> dtypes = [] {
    std::vector<std::string> names;
    for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i)
      names.emplace_back(c10::toString(static_cast<c10::ScalarType>(i)));
    return names;
  }();
  black_box_->set_names(kOpNames, std::vector<std::string_view>(dtypes.begin(), dtypes.end()));
  black_box_group_ = black_box_->group(context.group.name, context.group.global_ranks);
}

// --- membership ---

void QueuedBackend::abort() { fail(Aborted(text("rank ", shown(getRank()), " aborted group '", group_name_, "'"))); }

void QueuedBackend::end_membership() {
  queue_->stop();
  if (on_leave_) on_leave_(this);
  std::shared_ptr<void> released;  // without the lock
  const std::lock_guard lock(memory_mutex_);
  membership_has_ended_ = true;
  released.swap(memory_);
}

void QueuedBackend::hold_memory() {
  const std::lock_guard lock(memory_mutex_);
  if (memory_ || membership_has_ended_) return;  // after the end, nothing would release it
  const auto self = c10::intrusive_ptr<QueuedBackend>::unsafe_reclaim_from_nonowning(this);
  memory_ = std::make_shared<c10::weak_intrusive_ptr<QueuedBackend>>(self);
}

std::shared_ptr<void> QueuedBackend::memory() const {
  const std::lock_guard lock(memory_mutex_);
  return memory_;
}

bool QueuedBackend::in_fork() const { return pid_ != ::getpid(); }

// --- the black box ---

namespace {
uint64_t nanoseconds_of(Clock::time_point time) { return static_cast<uint64_t>(time.time_since_epoch().count()); }
}  // namespace

uint64_t QueuedBackend::log_begin(const Operation& operation, shm::BlackBoxState state, Clock::time_point now) const {
  if (!black_box_) return 0;
  const at::Tensor& sample =
      operation.tensor.defined() || operation.inputs.empty() ? operation.tensor : operation.inputs[0];
  return black_box_->begin(entry_of(operation.kind, operation.peer, operation.tag,
                                    sample.defined() ? sample.scalar_type() : at::kByte, bytes_of(operation), state),
                           nanoseconds_of(now));
}

shm::BlackBoxEntry QueuedBackend::entry_of(OpKind kind, int peer, int tag, at::ScalarType dtype, size_t bytes,
                                           shm::BlackBoxState state) const {
  const bool message = is_message(kind), rooted = kind == OpKind::kBroadcast || kind == OpKind::kReduce ||
                                                  kind == OpKind::kGather || kind == OpKind::kScatter;
  return {.group = black_box_group_,
          .operation = static_cast<uint8_t>(kind),
          .dtype = static_cast<uint8_t>(dtype),
          .bytes = bytes,
          .sequence = message || state == shm::BlackBoxState::kPosted ? shm::kNoSequence : next_sequence(),
          .peer = message || rooted ? peer : -1,
          .tag = static_cast<uint64_t>(tag),
          .state = state};
}

uint64_t QueuedBackend::log_begin(const SmallCall& call, at::ScalarType dtype, size_t bytes,
                                  Clock::time_point now) const {
  if (!black_box_) return 0;
  return black_box_->begin(entry_of(call.kind, call.peer, call.tag, dtype, bytes, shm::BlackBoxState::kRunning),
                           nanoseconds_of(now));
}

void QueuedBackend::log_done(const SmallCall& call, at::ScalarType dtype, size_t bytes, Clock::time_point began,
                             Clock::time_point ended) const {
  if (!black_box_) return;
  black_box_->add(entry_of(call.kind, call.peer, call.tag, dtype, bytes, shm::BlackBoxState::kDone),
                  nanoseconds_of(began), nanoseconds_of(ended));
}

void QueuedBackend::log_end(uint64_t ticket, const std::exception_ptr& error, Clock::time_point now) const {
  if (!black_box_) return;
  auto state = shm::BlackBoxState::kDone;
  if (error) {
    state = shm::BlackBoxState::kFailed;
    try {
      std::rethrow_exception(error);
    } catch (const Error& ours) {
      state = shm::state_of(ours);
    } catch (...) {
    }
  }
  black_box_->end(ticket, state, nanoseconds_of(now));
}

void QueuedBackend::run_logged(const Operation& operation, Deadline deadline, bool by_waiter, uint64_t ticket) {
  try {
    run_collective(operation, deadline, by_waiter);
  } catch (...) {
    log_end(ticket, std::current_exception());
    throw;
  }
  log_end(ticket, nullptr);
}

// --- operations ---

void QueuedBackend::run(const Operation& operation) {
  validate(operation, getRank(), getSize(), name_);
  std::optional<at::RecordFunction> record;
  if (profiling()) [[unlikely]] {
    std::vector<c10::IValue> inputs;
    for (const auto& tensor : profiled_inputs({&operation, 1})) inputs.emplace_back(tensor);
    record.emplace(at::RecordScope::USER_SCOPE);
    if (record->isActive()) {
      record->_setAsync();  // as c10d::Work does, so that all of a backend's events are of one kind
      record->before(profiling_title(operation), c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
    }
  }
  // The clock is read only twice, for all that needs the time: each read costs a tenth of a small operation.
  const auto began = FastClock::now();
  const Deadline deadline = deadline_for(operation.timeout, began);
  std::exception_ptr error;
  const auto framed = [&](auto&& body) {
    const uint64_t ticket = log_begin(operation, shm::BlackBoxState::kRunning, began);
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
    const auto ended = FastClock::now();
    log_end(ticket, error, ended);
    counters_->add_blocked(ended - began);
  };
  // The World may end in another thread while this one waits here. The queue keeps the backend alive until its job is
  // over; for a message, `self` keeps it alive. Nothing of this backend is touched after that.
  if (is_message(operation.kind)) {
    const auto self = c10::intrusive_ptr<QueuedBackend>::unsafe_reclaim_from_nonowning(this);
    framed([&] {
      run_message(operation, deadline);
      count(operation);
    });
  } else {
    queue_->run([&](bool by_waiter) { framed([&] { run_collective(operation, deadline, by_waiter); }); }, deadline,
                [&] { fail_late(operation, began); });
  }
  if (error) std::rethrow_exception(error);
}

void QueuedBackend::fail_late(const Operation& operation, Clock::time_point began) {
  fail(TimeoutError(text(describe(descriptor_of(operation)), " of group '", group_name_, "' on rank ", shown(getRank()),
                         " has waited for its turn for ", describe(Clock::now() - began),
                         ", behind operations of this rank that have not ended"),
                    {}, "Look at the operations before it, or raise the timeout"));
}

c10::intrusive_ptr<c10d::Work> QueuedBackend::submit(Operation operation) {
  validate(operation, getRank(), getSize(), name_);
  if (!is_message(operation.kind)) return enqueue({std::move(operation)});
  hold_memory();
  const Deadline deadline = deadline_for(operation.timeout);
  const uint64_t ticket = log_begin(operation, shm::BlackBoxState::kRunning, Clock::now());
  auto work = make_work(nullptr, {std::move(operation)}, deadline);
  work->on_complete([this, ticket](const std::exception_ptr& error) { log_end(ticket, error); });
  try {
    submit_message(work, deadline);
  } catch (...) {  // nothing will complete the work
    log_end(ticket, std::current_exception());
    throw;
  }
  return work;
}

c10::intrusive_ptr<c10d::Work> QueuedBackend::submit_batch(std::vector<Operation> operations) {
  if (operations.empty()) throw InvalidArgument("a batch of operations is empty");
  for (const auto& operation : operations) {
    if (is_message(operation.kind)) throw InvalidArgument("a batch contains messages; issue them one by one");
    validate(operation, getRank(), getSize(), name_);
  }
  return enqueue(std::move(operations));
}

QueuedBackend::WorkPtr QueuedBackend::make_work(std::shared_ptr<CollectiveQueue> queue,
                                                std::vector<Operation> operations, Deadline deadline) const {
  const auto own = operations[0].timeout;
  const std::optional<std::chrono::milliseconds> c10d_limit =
      for_pytorch_ ? std::optional(own.count() > 0 ? own : timeout()) : std::nullopt;
  return c10::make_intrusive<OperationWork>(getRank(), counters_, std::move(queue), std::move(operations), deadline,
                                            c10d_limit);
}

QueuedBackend::WorkPtr QueuedBackend::enqueue(std::vector<Operation> operations) {
  check();
  const Deadline deadline = deadline_for(operations[0].timeout);
  std::vector<uint64_t> tickets;
  for (const auto& operation : operations)
    tickets.push_back(log_begin(operation, shm::BlackBoxState::kPosted, Clock::now()));
  auto work = make_work(queue_, std::move(operations), deadline);
  const auto job = [this, work, deadline, tickets](bool by_waiter) {
    // A thread that waits for a later operation with a shorter timeout runs this one only until then.
    const Deadline patience = CollectiveQueue::patience_of_this_thread();
    const Deadline until = by_waiter && patience.when() < deadline.when() ? patience : deadline;
    std::exception_ptr error;
    for (size_t i = 0; i < tickets.size(); ++i) {
      if (error) {  // an earlier operation of the batch failed
        log_end(tickets[i], error);
        continue;
      }
      if (black_box_) black_box_->start(tickets[i], next_sequence());
      try {
        run_logged(work->operations()[i], until, by_waiter, tickets[i]);
      } catch (...) {
        error = std::current_exception();
      }
    }
    return work->end(std::move(error));
  };
  queue_->submit(job, [work] { work->mark_future(); });
  return work;
}

void QueuedBackend::run_collective(const Operation& operation, Deadline deadline, bool by_waiter) {
  const bool of_parts = operation.kind == OpKind::kAllReduceSparse ||
                        (operation.kind == OpKind::kAllGather && unequal(operation.outputs)) ||
                        (operation.kind == OpKind::kReduceScatter && unequal(operation.inputs));
  if (of_parts)
    run_parts(operation, deadline, by_waiter);
  else if (operation.op == ReduceOp::PREMUL_SUM)
    execute(premultiplied(operation, getRank()), deadline, by_waiter);
  else
    execute(operation, deadline, by_waiter);
  count(operation);
}

// An error that stops one rank between two parts stops the group, like an error within a part: the others would wait
// for that rank.
void QueuedBackend::run_parts(const Operation& operation, Deadline deadline, bool by_waiter) {
  try {
    if (operation.kind == OpKind::kAllReduceSparse)
      all_reduce_sparse(operation, deadline, by_waiter);
    else if (operation.kind == OpKind::kAllGather)
      all_gather_unequal(operation, deadline, by_waiter);
    else
      reduce_scatter_unequal(operation, deadline, by_waiter);
  } catch (const Error& error) {
    fail(error);
    throw;
  } catch (const std::exception& error) {
    fail(Unavailable(text("rank ", shown(getRank()), " failed in ", to_string(operation.kind), ": ", error.what())));
    throw;
  }
}

void QueuedBackend::all_gather_unequal(const Operation& operation, Deadline deadline, bool by_waiter) {
  {
    const at::NoGradGuard no_grad;
    const at::Tensor& own = operation.outputs[static_cast<size_t>(getRank())];
    at::Tensor(own).copy_(operation.tensor.reshape(own.sizes()));
  }
  for (int r = 0; r < getSize(); ++r)
    execute(part(operation, OpKind::kBroadcast, operation.outputs[static_cast<size_t>(r)], r), deadline, by_waiter);
}

void QueuedBackend::reduce_scatter_unequal(const Operation& operation, Deadline deadline, bool by_waiter) {
  const Operation sum = operation.op == ReduceOp::PREMUL_SUM ? premultiplied(operation, getRank()) : operation;
  for (int r = 0; r < getSize(); ++r) {
    at::Tensor contribution = sum.inputs[static_cast<size_t>(r)];
    if (r == getRank()) {
      const at::NoGradGuard no_grad;
      contribution = at::Tensor(sum.tensor).copy_(contribution.reshape(sum.tensor.sizes()));
    }
    execute(part(sum, OpKind::kReduce, contribution, r), deadline, by_waiter);
  }
}

void QueuedBackend::all_reduce_sparse(const Operation& operation, Deadline deadline, bool by_waiter) {
  const at::NoGradGuard no_grad;
  const at::Tensor mine = operation.tensor.coalesce();
  const auto gather = [&](const at::Tensor& input, const std::vector<at::Tensor>& outputs) {
    Operation gathering = part(operation, OpKind::kAllGather, input, 0);
    gathering.outputs = outputs;
    if (unequal(outputs))
      all_gather_unequal(gathering, deadline, by_waiter);
    else
      execute(gathering, deadline, by_waiter);
  };
  // Each rank's shape: number of sparse and dense dimensions, number of elements, sizes. Its length differs between
  // tensors with different numbers of dimensions.
  std::vector<int64_t> shape = {mine.sparse_dim(), mine.dense_dim(), mine._nnz()};
  shape.insert(shape.end(), mine.sizes().begin(), mine.sizes().end());
  const auto length = static_cast<int64_t>(shape.size());
  const auto n = static_cast<size_t>(getSize());
  const at::Tensor own_shape = at::empty({length}, at::kLong), shapes = at::empty({getSize() * length}, at::kLong);
  std::copy(shape.begin(), shape.end(), own_shape.mutable_data_ptr<int64_t>());
  gather(own_shape, {shapes});
  const int64_t* const all = shapes.const_data_ptr<int64_t>();
  std::vector<at::Tensor> indices, values;
  for (size_t r = 0; r < n; ++r) {
    const int64_t* const theirs = all + static_cast<int64_t>(r) * length;
    for (int64_t i = 0; i < length; ++i)
      if (i != 2 && theirs[i] != all[i])
        throw Mismatch(text("sparse all_reduce: rank ", r, "'s tensor has another shape than rank 0's (sizes ",
                            join(at::IntArrayRef(theirs + 3, static_cast<size_t>(length - 3))), " instead of ",
                            join(at::IntArrayRef(all + 3, static_cast<size_t>(length - 3))), ", ", theirs[0],
                            " sparse dimensions instead of ", all[0], ")"),
                       "Use tensors of one shape on all ranks");
    std::vector<int64_t> value_sizes = mine._values().sizes().vec();
    value_sizes[0] = theirs[2];
    indices.push_back(at::empty({mine.sparse_dim(), theirs[2]}, at::kLong));
    values.push_back(at::empty(value_sizes, mine._values().options()));
  }
  gather(mine._indices().contiguous(), indices);
  gather(mine._values().contiguous(), values);
  at::Tensor sum = at::_sparse_coo_tensor_unsafe(at::cat(indices, 1), at::cat(values, 0), mine.sizes()).coalesce();
  if (operation.op == ReduceOp::AVG) sum._values().div_(getSize());
  at::Tensor(operation.tensor).copy_(sum);
}

}  // namespace muster::comm
