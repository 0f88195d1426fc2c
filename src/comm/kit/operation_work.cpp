#include "comm/kit/operation_work.h"

#include <ATen/core/jit_type.h>
#include <cxxabi.h>

#include <string>
#include <string_view>

#include "base/cycles.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/core/c10d_errors.h"
#include "muster/base/deadline.h"
#include "muster/base/error.h"

namespace muster::comm {
namespace {

thread_local int callbacks = 0;  // how many callbacks of futures this thread is in

c10d::OpType c10d_type(const Operation& operation) {
  using c10d::OpType;
  switch (operation.kind) {
    case OpKind::kAllReduce:
      return OpType::ALLREDUCE;
    case OpKind::kBroadcast:
      return OpType::BROADCAST;
    case OpKind::kReduce:
      return OpType::REDUCE;
    case OpKind::kAllGather:
      return operation.outputs.size() == 1 ? OpType::_ALLGATHER_BASE : OpType::ALLGATHER;
    case OpKind::kReduceScatter:
      return operation.inputs.size() == 1 ? OpType::_REDUCE_SCATTER_BASE : OpType::REDUCE_SCATTER;
    case OpKind::kGather:
      return OpType::GATHER;
    case OpKind::kScatter:
      return OpType::SCATTER;
    case OpKind::kAllToAll:
      return operation.inputs.size() == 1 ? OpType::ALLTOALL_BASE : OpType::ALLTOALL;
    case OpKind::kBarrier:
      return OpType::BARRIER;
    case OpKind::kSend:
      return OpType::SEND;
    case OpKind::kRecv:
      return operation.peer == kAnySource ? OpType::RECVANYSOURCE : OpType::RECV;
    case OpKind::kAllReduceSparse:
      return OpType::_ALLREDUCE_SPARSE;
    case OpKind::kScan:  // c10d has none
    case OpKind::kNothing:
      break;
  }
  return OpType::UNKNOWN;
}

}  // namespace

bool in_callback_of_future() { return callbacks > 0; }

OperationWork::OperationWork(int rank, const OperationLog* log, std::shared_ptr<OperationCounters> counters,
                             std::shared_ptr<CollectiveQueue> queue, std::vector<Operation> operations,
                             Deadline deadline, std::optional<std::chrono::milliseconds> c10d_limit,
                             std::chrono::nanoseconds slack)
    : c10d::Work(rank, operations.size() == 1 ? c10d_type(operations[0]) : c10d::OpType::COALESCED,
                 profiling() ? profiling_title(operations[0]) : nullptr,
                 profiling() ? std::make_optional(profiled_inputs(operations)) : std::nullopt),
      counters_(std::move(counters)),
      queue_(std::move(queue)),
      operations_(std::move(operations)),
      slack_(slack),
      latest_(deadline.later(slack)),
      record_(log, counters_, operations_, queue_ ? std::nullopt : std::optional(shm::kNoSequence)),
      c10d_limit_(c10d_limit) {}

OperationWork::OperationWork(int rank, Operation operation)
    : c10d::Work(rank, c10d_type(operation)), operations_{std::move(operation)} {
  complete();
}

bool OperationWork::wait(std::chrono::milliseconds timeout) {
  if (!isCompleted()) {
    const auto began = FastClock::now();
    struct Account {
      OperationCounters& counters;
      Clock::time_point began;
      ~Account() { counters.add_blocked(FastClock::now_after(began) - began); }
    } account{*counters_, began};
    const bool unlimited = timeout == kNoTimeout;
    if (unlimited && queue_) queue_->drive([this] { return isCompleted(); }, latest_);
    if (unlimited && mover_) mover_();
    std::unique_lock lock(mutex_);
    const auto until = unlimited ? latest_ : Deadline::after(timeout);
    if (!until.wait(cv_, lock, [this] { return completed_; })) {
      const auto late = [&](auto&&... words) {
        return std::make_exception_ptr(
            TimeoutError(text(words..., to_string(operations_[0].kind), " is still under way")));
      };
      // c10d's own works throw.
      if (c10d_limit_) std::rethrow_exception(as_c10d_error(late("Operation timed out! "), timeout));
      if (unlimited)
        std::rethrow_exception(
            late(std::chrono::duration_cast<std::chrono::seconds>(slack_).count(), " s after its deadline, "));
      return false;
    }
  }
  const std::lock_guard lock(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

std::vector<at::Tensor> OperationWork::result() {
  std::vector<at::Tensor> tensors;
  for (const auto& operation : operations_) {
    const bool written = operation.outputs.empty() && operation.tensor.defined();
    if (written) tensors.push_back(operation.tensor);
    tensors.insert(tensors.end(), operation.outputs.begin(), operation.outputs.end());
  }
  return tensors;
}

bool OperationWork::end(std::exception_ptr error) {
  record_.end(error);  // before any wait() returns
  if (error && c10d_limit_) error = as_c10d_error(error, *c10d_limit_);
  finish(std::move(error));
  done_.store(true, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  return future_ != nullptr;  // a getFuture() that comes later marks the future itself
}

c10::intrusive_ptr<c10::ivalue::Future> OperationWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (!future_) future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future = future_;
  }
  mark_future();
  return future;
}

void OperationWork::mark_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (!future_ || !completed_ || future_marked_) return;
    future_marked_ = true;
    future = future_;
  }
  struct InCallback {
    InCallback() { ++callbacks; }
    ~InCallback() { --callbacks; }
  } const in_callback;
  // Of callbacks, libtorch itself catches only what those of Future::then() throw.
  const auto log = [&](std::string_view what) {
    MUSTER_LOG(kError) << "a callback of the future of " << to_string(operations_[0].kind)
                       << " threw, so libtorch does not call those that were added after it: "
                       << what.substr(0, what.find('\n'));
  };
  try {
    if (exception_)
      future->setError(exception_);
    else
      future->markCompleted(c10::IValue(result()));
  } catch (const abi::__forced_unwind&) {  // the thread is cancelled, as Python does when it ends
    throw;
  } catch (const std::exception& error) {
    log(error.what());
  } catch (...) {
    log("not a std::exception");
  }
}

}  // namespace muster::comm
