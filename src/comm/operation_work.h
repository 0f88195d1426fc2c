// What a backend with a Lane gives back for asynchronous operations.
//
// Whoever waits for it without a limit runs it, and what is queued before it, if that has not begun (lane.h). Time
// spent in wait() counts as time blocked in communication. Its future is made when somebody asks for one.
//
// Thread-safety: all methods.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>

#include "comm/backend.h"
#include "comm/lane.h"
#include "muster/base/deadline.h"

namespace muster::comm {

// Shared by a backend and its works, which may outlive it.
struct OperationCounters {
  std::atomic<uint64_t> operations{0}, bytes{0};
  std::atomic<int64_t> blocked_ns{0};
  std::atomic<int64_t> under_way{0};  // works that have not ended

  // Of operations in the lane, one at a time: no locked instruction.
  std::atomic<uint64_t> lane_operations{0}, lane_bytes{0};
  std::atomic<int64_t> lane_blocked_ns{0};

  void count(const Operation& operation);
  void count_in_lane(uint64_t size, std::chrono::nanoseconds blocked) {
    add(lane_operations, uint64_t{1});
    add(lane_bytes, size);
    add(lane_blocked_ns, int64_t{blocked.count()});
  }
  uint64_t completed() const {
    return operations.load(std::memory_order_relaxed) + lane_operations.load(std::memory_order_relaxed);
  }
  void add_blocked(std::chrono::nanoseconds time) { blocked_ns.fetch_add(time.count(), std::memory_order_relaxed); }
  CommStats stats() const;

 private:
  template <typename Number>
  static void add(std::atomic<Number>& sum, Number value) {
    sum.store(sum.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
  }
};

class OperationWork final : public c10d::Work {
 public:
  // `lane` is null for messages. `deadline`: of the operations, which fail soon after it. With `c10d_limit`, the
  // timeout that holds, it throws c10d's errors.
  OperationWork(int rank, std::shared_ptr<OperationCounters> counters, std::shared_ptr<Lane> lane,
                std::vector<Operation> operations, Deadline deadline,
                std::optional<std::chrono::milliseconds> c10d_limit);
  // Of an operation that has completed.
  OperationWork(int rank, Operation operation);
  ~OperationWork() override;

  bool isCompleted() override { return done_.load(std::memory_order_acquire) || c10d::Work::isCompleted(); }
  // Without a timeout, until the operations have ended: by their deadline, and a minute later at the latest, if what
  // should end them does not.
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  int sourceRank() const override { return source_.load(std::memory_order_relaxed); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  const std::vector<Operation>& operations() const { return operations_; }
  void set_source(int rank) { source_.store(rank, std::memory_order_relaxed); }
  // Called first when it completes; set before anybody can complete it.
  void on_complete(std::function<void(const std::exception_ptr&)> callback) { on_complete_ = std::move(callback); }
  // The two halves of complete(). end(): whether mark_future() is to follow. mark_future() calls what the user has put
  // behind the future, which may do and wait for operations: so not where that would stand in their way.
  bool end(std::exception_ptr error);
  void mark_future();  // once, when done and when there is one
  void complete(std::exception_ptr error = nullptr) {
    if (end(std::move(error))) mark_future();
  }

 private:
  const std::shared_ptr<OperationCounters> counters_;
  const std::shared_ptr<Lane> lane_;
  const std::vector<Operation> operations_;
  const Deadline latest_ = Deadline::never();  // of a wait without a limit
  std::function<void(const std::exception_ptr&)> on_complete_;
  const std::optional<std::chrono::milliseconds> c10d_limit_;
  std::atomic<int> source_{-1};
  std::atomic<bool> done_{false};                   // what c10d::Work says under its lock, soon after
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mutex_
  bool future_marked_ = false;
};

// Of this rank's payload.
size_t bytes_of(const Operation& operation);
// "muster:all_reduce", as profilers show it; lives for ever.
const char* profiling_title(const Operation& operation);
// The tensors whose shapes a profiler shows: what goes in, as with PyTorch's own backends.
std::vector<at::Tensor> profiled_inputs(std::span<const Operation> operations);
// Whether a profiler listens.
bool profiling();

}  // namespace muster::comm
