#include "comm/operation_work.h"

#include <ATen/core/jit_type.h>
#include <ATen/record_function.h>

#include <array>
#include <string>

#include "base/text.h"
#include "comm/c10d_errors.h"
#include "muster/base/deadline.h"
#include "muster/base/error.h"

namespace muster::comm {
namespace {

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
    case OpKind::kNothing:
      break;
  }
  return OpType::UNKNOWN;
}

}  // namespace

size_t bytes_of(const Operation& operation) {
  size_t size = 0;
  if (operation.kind == OpKind::kAllToAll)
    for (const auto& input : operation.inputs) size += input.nbytes();
  else if (operation.tensor.defined() && operation.tensor.layout() == at::kStrided)
    size = operation.tensor.nbytes();
  return size;
}

void OperationCounters::count(const Operation& operation) {
  operations.fetch_add(1, std::memory_order_relaxed);
  bytes.fetch_add(bytes_of(operation), std::memory_order_relaxed);
}

CommStats OperationCounters::stats() const {
  return {.operations = completed(),
          .bytes = bytes.load(std::memory_order_relaxed) + lane_bytes.load(std::memory_order_relaxed),
          .blocked = std::chrono::nanoseconds(blocked_ns.load(std::memory_order_relaxed) +
                                              lane_blocked_ns.load(std::memory_order_relaxed))};
}

const char* profiling_title(const Operation& operation) {
  if (operation.kind == OpKind::kRecv && operation.peer == kAnySource) return "muster:recvAnySource";
  static const auto titles = [] {
    std::array<std::string, std::size(kOpNames)> list;
    for (size_t i = 0; i < list.size(); ++i) list[i] = "muster:" + std::string(kOpNames[i]);
    return list;
  }();
  return titles[static_cast<size_t>(operation.kind)].c_str();
}

std::vector<at::Tensor> profiled_inputs(std::span<const Operation> operations) {
  std::vector<at::Tensor> tensors;
  for (const auto& operation : operations) {
    tensors.insert(tensors.end(), operation.inputs.begin(), operation.inputs.end());
    if (operation.inputs.empty() && operation.tensor.defined()) tensors.push_back(operation.tensor);
  }
  return tensors;
}

bool profiling() { return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value(); }

OperationWork::OperationWork(int rank, std::shared_ptr<OperationCounters> counters, std::shared_ptr<Lane> lane,
                             std::vector<Operation> operations, std::optional<std::chrono::milliseconds> c10d_limit)
    : c10d::Work(rank, operations.size() == 1 ? c10d_type(operations[0]) : c10d::OpType::COALESCED,
                 profiling() ? profiling_title(operations[0]) : nullptr,
                 profiling() ? std::make_optional(profiled_inputs(operations)) : std::nullopt),
      counters_(std::move(counters)),
      lane_(std::move(lane)),
      operations_(std::move(operations)),
      c10d_limit_(c10d_limit) {}

OperationWork::OperationWork(int rank, Operation operation)
    : c10d::Work(rank, c10d_type(operation)), operations_{std::move(operation)} {
  complete();
}

bool OperationWork::wait(std::chrono::milliseconds timeout) {
  if (!isCompleted()) {
    const auto began = Clock::now();
    struct Account {
      OperationCounters& counters;
      Clock::time_point began;
      ~Account() { counters.add_blocked(Clock::now() - began); }
    } account{*counters_, began};
    if (timeout == kNoTimeout && lane_) lane_->drive([this] { return isCompleted(); });
    std::unique_lock lock(mutex_);
    const auto completed = [this] { return completed_; };
    if (timeout == kNoTimeout)
      cv_.wait(lock, completed);
    else if (!cv_.wait_for(lock, timeout, completed)) {
      if (!c10d_limit_) return false;
      // c10d's own works throw.
      std::rethrow_exception(
          as_c10d_error(std::make_exception_ptr(
                            Timeout(text("Operation timed out! ", to_string(operations_[0].kind), " is under way"))),
                        timeout));
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
  if (on_complete_) on_complete_(error);
  if (error && c10d_limit_) error = as_c10d_error(error, *c10d_limit_);
  finish(std::move(error));
  done_.store(true, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  return future_ != nullptr;  // who asks for one from now on marks it
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
  if (exception_)
    future->setError(exception_);
  else
    future->markCompleted(c10::IValue(result()));
}

}  // namespace muster::comm
