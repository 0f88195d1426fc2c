// The c10d::Work that a backend with a CollectiveQueue returns for asynchronous operations.
//
// A thread that waits for it without a limit runs its operations, and those that are queued before it, if they have not
// begun (collective_queue.h); or it moves messages, if the backend says how. It may run callbacks of other works
// meanwhile, so its caller must hold nothing that they need. Time spent in wait() counts as time blocked in
// communication. Its future is made by the first call of getFuture().
//
// Thread-safety: all methods.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "comm/core/backend.h"
#include "comm/kit/collective_queue.h"
#include "comm/kit/operation_record.h"
#include "muster/base/deadline.h"

namespace muster::comm {

class OperationWork final : public c10d::Work {
 public:
  // `log`: as that of a WorkRecord. `queue` is null for messages. The operations fail soon after `deadline`. If
  // `c10d_limit`, the timeout that applies, is given, wait() throws c10d's errors. `slack`: how long after `deadline`
  // a wait without a limit gives up.
  OperationWork(int rank, const OperationLog* log, std::shared_ptr<OperationCounters> counters,
                std::shared_ptr<CollectiveQueue> queue, std::vector<Operation> operations, Deadline deadline,
                std::optional<std::chrono::milliseconds> c10d_limit, std::chrono::nanoseconds slack = kSlack);
  // The work of an operation that has completed.
  OperationWork(int rank, Operation operation);

  bool isCompleted() override { return done_.load(std::memory_order_acquire) || c10d::Work::isCompleted(); }
  // Without a timeout, waits until the operations have ended. They end by their deadline; if they do not, wait() throws
  // TimeoutError a minute later.
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  int sourceRank() const override { return source_.load(std::memory_order_relaxed); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  const std::vector<Operation>& operations() const { return operations_; }
  // Before the work is shared: what a thread that waits for it without a limit does until it is done.
  void set_mover(std::function<void()> mover) { mover_ = std::move(mover); }
  void set_source(int rank) { source_.store(rank, std::memory_order_relaxed); }
  WorkRecord& record() { return record_; }  // for the thread that runs the operations
  // The two halves of complete(). end() returns whether mark_future() must follow. mark_future() calls the user's
  // callbacks of the future, which may run operations and wait for them. So the thread must not hold what they need.
  bool end(std::exception_ptr error);
  // Marks it once, when the work is done and the future exists. What a callback throws is logged; libtorch then calls
  // no callback that was added later.
  void mark_future();
  void complete(std::exception_ptr error = nullptr) {
    if (end(std::move(error))) mark_future();
  }

 private:
  const std::shared_ptr<OperationCounters> counters_;
  const std::shared_ptr<CollectiveQueue> queue_;
  const std::vector<Operation> operations_;
  const std::chrono::nanoseconds slack_ = kSlack;
  const Deadline latest_ = Deadline::never();  // of a wait without a limit
  WorkRecord record_;
  const std::optional<std::chrono::milliseconds> c10d_limit_;
  std::function<void()> mover_;
  std::atomic<int> source_{-1};
  std::atomic<bool> done_{false};                   // c10d's completed_, readable without its lock; set soon after it
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mutex_
  bool future_marked_ = false;
};

}  // namespace muster::comm
