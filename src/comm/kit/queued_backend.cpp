#include "comm/kit/queued_backend.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <algorithm>

#include "base/text.h"
#include "base/thread.h"
#include "comm/kit/failure_note.h"
#include "comm/kit/flatten.h"
#include "comm/kit/validate.h"
#include "muster/base/error.h"

namespace muster::comm {
namespace {

bool unequal(const std::vector<at::Tensor>& parts) {
  return std::any_of(parts.begin(), parts.end(), [&](const auto& part) { return part.numel() != parts[0].numel(); });
}

// Whether elements of one may be among those of the other.
bool share_memory(const at::Tensor& one, const at::Tensor& other) {
  const auto range = [](const at::Tensor& of) {
    const auto* const begin = static_cast<const char*>(of.const_data_ptr());
    int64_t last = 0;  // of the elements
    for (int64_t dim = 0; dim < of.dim(); ++dim) last += (of.size(dim) - 1) * of.stride(dim);
    return std::pair(begin, of.numel() == 0 ? begin : begin + (last + 1) * static_cast<int64_t>(of.element_size()));
  };
  const auto a = range(one), b = range(other);
  return a.first < b.second && b.first < a.second;
}
// The same, unless both are just the same memory.
bool may_overlap(const at::Tensor& one, const at::Tensor& other) {
  const bool is_same = one.const_data_ptr() == other.const_data_ptr() && one.numel() == other.numel() &&
                       one.is_contiguous() && other.is_contiguous();
  return !is_same && share_memory(one, other);
}

// `to` may be `from`, seen through another view.
void copy_part(const at::Tensor& to, const at::Tensor& from) {
  if (to.const_data_ptr() == from.const_data_ptr() && to.is_contiguous() && from.is_contiguous()) return;
  const BelowAutograd below;
  at::Tensor(to).copy_(from.reshape(to.sizes()));
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
  const BelowAutograd below;
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

// Whether another rank of the group is a thread of this process.
bool shares_process(const BackendContext& context) {
  return context.host.ranks_are_threads ||
         std::count_if(context.group.members.begin(), context.group.members.end(),
                       [](const Member& member) { return member.pid == ::getpid(); }) > 1;
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
      faults_(context.options.faults, context.group.name, context.group.rank, shares_process(context),
              {.failed = [this] { return failed(); },
               .check = [this] { check(); },
               .drop_out =
                   [this](const std::string& why) {
                     leave_group(why);
                     std::rethrow_exception(error_of(own_end(why), shown(getRank()), last_operation()));
                   }}),
      queue_(std::make_shared<CollectiveQueue>("muster-" + context.group.name)),
      log_(context) {
  for_pytorch_ = context.options.for_pytorch;
}

// --- membership ---

FailureReport QueuedBackend::own_end(const std::string& cause) const {
  const int me = shown(getRank());
  return {.code = ErrorCode::kPeerLost, .subject = me, .pid = pid_, .finder = me, .what = ended_by(me, cause)};
}

std::exception_ptr QueuedBackend::as_own(const Error& error) const {
  const int me = shown(getRank());
  return error_of(failure_of(error, me), me, last_operation());
}

void QueuedBackend::leave(const std::string& cause) {
  if (in_fork() || has_left_.exchange(true)) return;
  const WithoutInterpreterLock unlocked;
  leave_group(cause);
  end_threads();
  end_membership();
}

void QueuedBackend::fail(const Error& cause) {
  if (!in_fork()) fail_group(cause);
}

std::exception_ptr QueuedBackend::known_failure() {
  if (in_fork() || has_left()) return nullptr;
  try {
    check();
  } catch (const Error&) {
    if (!has_left()) return std::current_exception();
  }
  return nullptr;
}

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

std::string QueuedBackend::last_operation() const {
  const uint64_t last = last_operation_.load(std::memory_order_relaxed);
  if (last == 0) return "no operation yet";
  return text(to_string(static_cast<OpKind>(last & 0xff)), " #", (last >> 8) - 1);
}

bool QueuedBackend::in_fork() const { return pid_ != ::getpid(); }

// --- operations ---

void QueuedBackend::throw_forked() const {
  throw Aborted(text("group '", group_name_, "' belongs to process ", pid_, ", of which this one is a fork"),
                "Make a group in this process, or communicate in its parent");
}

void QueuedBackend::require_valid(const Operation& operation) const {
  validate(operation, getRank(), getSize(), name_);
  require_possible(operation);
}

void QueuedBackend::run(const Operation& operation) {
  check_fork();
  require_valid(operation);
  OperationRecord record(log_, *counters_, operation);
  const Deadline deadline = deadline_for(operation.timeout, record.began());
  // The World may end in another thread while this one waits here. The queue keeps the backend alive until its job is
  // over; for a message, `self` keeps it alive. Nothing of this backend is touched after that.
  if (is_message(operation.kind)) {
    const auto self = c10::intrusive_ptr<QueuedBackend>::unsafe_reclaim_from_nonowning(this);
    record.run(shm::kNoSequence, [&] {
      run_message(operation, deadline);
      count(operation);
    });
  } else {
    queue_->run(
        [&](bool by_waiter) { record.run(next_sequence(), [&] { run_collective(operation, deadline, by_waiter); }); },
        deadline, [&] { fail_late(operation, record.began()); });
  }
  record.rethrow();
}

void QueuedBackend::fail_late(const Operation& operation, Clock::time_point began) {
  fail(TimeoutError(text(describe(descriptor_of(operation)), " of group '", group_name_, "' on rank ", shown(getRank()),
                         " has waited for its turn for ", describe(Clock::now() - began),
                         ", behind operations of this rank that have not ended"),
                    {}, "Look at the operations before it, or raise the timeout"));
}

c10::intrusive_ptr<c10d::Work> QueuedBackend::submit(Operation operation) {
  check_fork();
  require_valid(operation);
  if (!is_message(operation.kind)) return enqueue({std::move(operation)});
  hold_memory();
  const Deadline deadline = deadline_for(operation.timeout);
  auto work = make_work(&log_, nullptr, {std::move(operation)}, deadline);
  try {
    submit_message(work, deadline);
  } catch (...) {  // nothing will complete the work
    work->record().end(std::current_exception());
    throw;
  }
  return work;
}

// Nothing is sent unless all are valid.
std::vector<c10::intrusive_ptr<c10d::Work>> QueuedBackend::submit_messages(std::vector<Operation> messages) {
  check_fork();
  for (const Operation& message : messages) require_valid(message);
  return Backend::submit_messages(std::move(messages));
}

c10::intrusive_ptr<c10d::Work> QueuedBackend::submit_batch(std::vector<Operation> operations) {
  check_fork();
  if (operations.empty()) throw InvalidArgument("a batch of operations is empty");
  for (const auto& operation : operations) {
    if (is_message(operation.kind)) throw InvalidArgument("a batch contains messages; issue them one by one");
    require_valid(operation);
  }
  return enqueue(std::move(operations));
}

QueuedBackend::WorkPtr QueuedBackend::make_work(const OperationLog* log, std::shared_ptr<CollectiveQueue> queue,
                                                std::vector<Operation> operations, Deadline deadline) const {
  const auto own = operations[0].timeout;
  const std::optional<std::chrono::milliseconds> c10d_limit =
      for_pytorch_ ? std::optional(own.count() > 0 ? own : timeout()) : std::nullopt;
  return c10::make_intrusive<OperationWork>(getRank(), log, counters_, std::move(queue), std::move(operations),
                                            deadline, c10d_limit);
}

QueuedBackend::WorkPtr QueuedBackend::enqueue(std::vector<Operation> operations) {
  check();
  const Deadline deadline = deadline_for(operations[0].timeout);
  auto work = make_work(&log_, queue_, std::move(operations), deadline);
  const auto job = [this, work, deadline](bool by_waiter) {
    const NoSiteFinder elsewhere;  // this thread may be at another line now
    // A thread that waits for a later operation with a shorter timeout runs this one only until then.
    const Deadline patience = CollectiveQueue::patience_of_this_thread();
    const Deadline until = by_waiter && patience.when() < deadline.when() ? patience : deadline;
    std::exception_ptr error;
    for (const auto& operation : work->operations()) {
      error = work->record().run(next_sequence(), [&] { run_collective(operation, until, by_waiter); });
      if (error) break;  // then the others of the batch fail, too
    }
    return work->end(std::move(error));
  };
  try {
    queue_->submit(job, [work] { work->mark_future(); });
  } catch (...) {  // nothing will run the job
    work->record().end(std::current_exception());
    throw;
  }
  return work;
}

void QueuedBackend::run_collective(const Operation& operation, Deadline deadline, bool by_waiter) {
  const bool of_parts = operation.kind == OpKind::kAllReduceSparse ||
                        (operation.kind == OpKind::kAllGather && unequal(operation.outputs)) ||
                        (operation.kind == OpKind::kReduceScatter && unequal(operation.inputs));
  if (of_parts)
    run_parts(operation, deadline, by_waiter);
  else if (reduces(operation.kind) && operation.op == ReduceOp::PREMUL_SUM)
    execute_one(premultiplied(operation, getRank()), deadline, by_waiter);
  else
    execute_one(operation, deadline, by_waiter);
  count(operation);
}

void QueuedBackend::execute_one(const Operation& operation, Deadline deadline, bool by_waiter) {
  with_faults(deadline, [&] { execute(operation, deadline, by_waiter); });
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
    if (!has_left()) fail(error);  // if it has, the others learn that
    throw;
  } catch (const std::exception& error) {
    fail(Unavailable(text("rank ", shown(getRank()), " failed in ", to_string(operation.kind), ": ", error.what())));
    throw;
  }
}

void QueuedBackend::all_gather_unequal(const Operation& operation, Deadline deadline, bool by_waiter) {
  const at::Tensor& own = operation.outputs[static_cast<size_t>(getRank())];
  copy_part(own, may_overlap(own, operation.tensor) ? operation.tensor.clone() : operation.tensor);
  for (int r = 0; r < getSize(); ++r)
    execute_one(part(operation, OpKind::kBroadcast, operation.outputs[static_cast<size_t>(r)], r), deadline, by_waiter);
}

void QueuedBackend::reduce_scatter_unequal(const Operation& operation, Deadline deadline, bool by_waiter) {
  Operation sum = operation.op == ReduceOp::PREMUL_SUM ? premultiplied(operation, getRank()) : operation;
  for (size_t r = 0; r < sum.inputs.size(); ++r)
    if (at::Tensor& input = sum.inputs[r];
        r == static_cast<size_t>(getRank()) ? may_overlap(sum.tensor, input) : share_memory(sum.tensor, input))
      input = input.clone();
  for (int r = 0; r < getSize(); ++r) {
    at::Tensor contribution = sum.inputs[static_cast<size_t>(r)];
    if (r == getRank()) {
      copy_part(sum.tensor, contribution);
      contribution = sum.tensor;
    }
    execute_one(part(sum, OpKind::kReduce, contribution, r), deadline, by_waiter);
  }
}

void QueuedBackend::all_reduce_sparse(const Operation& operation, Deadline deadline, bool by_waiter) {
  const BelowAutograd below;
  const at::Tensor mine = operation.tensor.coalesce();
  const auto gather = [&](const at::Tensor& input, const std::vector<at::Tensor>& outputs) {
    Operation gathering = part(operation, OpKind::kAllGather, input, 0);
    gathering.outputs = outputs;
    if (unequal(outputs))
      all_gather_unequal(gathering, deadline, by_waiter);
    else
      execute_one(gathering, deadline, by_waiter);
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
        throw Mismatch(
            text("sparse all_reduce: rank ", shown(static_cast<int>(r)), "'s tensor has another shape than rank ",
                 shown(0), "'s (sizes ", join(at::IntArrayRef(theirs + 3, static_cast<size_t>(length - 3))),
                 " instead of ", join(at::IntArrayRef(all + 3, static_cast<size_t>(length - 3))), ", ", theirs[0],
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
