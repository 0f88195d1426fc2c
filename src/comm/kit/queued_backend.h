// The part that is common to backends that execute operations themselves, in order, on their own threads: validation,
// deadlines, the queue, works, counters, and the operations that are made of others:
//
//   all_gather with unequal parts        a broadcast from each rank
//   reduce_scatter with unequal parts    a reduce to each rank
//   PREMUL_SUM                           a multiplication, then the sum
//   sparse all_reduce                    all_gather of shapes, indices and values, added in rank order
//
// A derived backend implements execute() for the plain collectives, and messages.
//
// Thread-safety: as Backend.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/cycles.h"
#include "comm/core/backend.h"
#include "comm/core/context.h"
#include "comm/kit/collective_queue.h"
#include "comm/kit/operation_work.h"
#include "muster/base/deadline.h"
#include "shm/black_box.h"

namespace muster::comm {

class QueuedBackend : public Backend {
 public:
  QueuedBackend(const BackendContext& context, std::string name);

  void run(const Operation& operation) final;
  c10::intrusive_ptr<c10d::Work> submit(Operation operation) final;
  c10::intrusive_ptr<c10d::Work> submit_batch(std::vector<Operation> operations) final;
  CommStats stats() const final { return counters_->stats(); }
  bool is_idle() const final { return counters_->under_way.load(std::memory_order_acquire) == 0; }
  const std::string& group_name() const final { return group_name_; }
  std::chrono::milliseconds timeout() const final {
    return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  }

  // Throws the failure of a group that has failed.
  virtual void check() const = 0;

  const std::string getBackendName() const override { return name_; }
  void abort() final;
  void shutdown() final { leave({}); }
  void release_resources() final { leave({}); }  // called instead of the destructor if weak references are left
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ms_ = timeout.count(); }
  uint64_t getSequenceNumberForGroup() override { return counters_->completed(); }
  void setSequenceNumberForGroup() override {}  // numbers start at 0 on all ranks

 protected:
  using WorkPtr = c10::intrusive_ptr<OperationWork>;

  // Executes a collective on the calling thread. That is a thread that waits for it (by_waiter), or the queue's thread.
  virtual void execute(const Operation& operation, Deadline deadline, bool by_waiter) = 0;
  virtual void run_message(const Operation& operation, Deadline deadline) = 0;
  // Calls work->complete() sooner or later.
  virtual void submit_message(const WorkPtr& work, Deadline deadline) = 0;
  // The number, from 0, of the next collective of execute(), as it appears in error messages.
  virtual uint64_t next_sequence() const = 0;

  // The frame of a small call: its turn in the queue, the black box, the counters. `body(deadline)` executes the call.
  // Returns false, without having done anything, if the queue is busy or a profiler is active.
  template <typename Body>
  bool run_framed(const SmallCall& call, at::ScalarType dtype, size_t bytes, Body&& body) {
    if (profiling() || !queue_->try_take()) return false;
    const auto began = FastClock::now();
    const uint64_t ticket = log_begin(call, dtype, bytes, began);
    std::exception_ptr error;
    try {
      body(deadline_for(call.timeout, began));
    } catch (...) {
      error = std::current_exception();
    }
    const auto ended = FastClock::now();
    log_end(ticket, error, ended);
    if (!error) counters_->count_in_queue(bytes, ended - began);
    queue_->give_back();
    if (error) std::rethrow_exception(error);
    return true;
  }

  // The same for a message, which needs no queue: `body()` returns whether it has done it.
  template <typename Body>
  bool run_message_framed(const SmallCall& call, at::ScalarType dtype, size_t bytes, Body&& body) {
    if (profiling()) return false;
    const auto self = c10::intrusive_ptr<QueuedBackend>::unsafe_reclaim_from_nonowning(this);  // run() says why
    const auto began = FastClock::now();
    if (!body()) return false;
    // A send that is done here has not waited; reading the clock again would take as long as the send.
    const auto ended = call.kind == OpKind::kSend ? began : FastClock::now();
    log_done(call, dtype, bytes, began, ended);
    counters_->operations.fetch_add(1, std::memory_order_relaxed);
    counters_->bytes.fetch_add(bytes, std::memory_order_relaxed);
    if (ended != began) counters_->add_blocked(ended - began);
    return true;
  }

  // Makes the work of a message. The caller completes it, and writes its entries in the black box.
  WorkPtr make_message_work(Operation message) {
    hold_memory();
    const Deadline deadline = deadline_for(message.timeout);
    return make_work(nullptr, {std::move(message)}, deadline);
  }
  void count(const Operation& operation) { counters_->count(operation); }
  // Keeps this object's memory for a thread of the backend that runs callbacks of messages. A callback may release the
  // last reference to the backend: then release_resources() ends the membership inside the callback, and the thread
  // finds the object still there when the callback returns. Null before the first message, and after the membership.
  std::shared_ptr<void> memory() const;
  // The last step of leave(). Destructors of derived classes call leave(), before what execute() needs is destroyed.
  void end_membership();
  bool in_fork() const;        // this process is a fork of the member; the membership belongs to its parent
  int shown(int rank) const {  // the number of `rank` in messages and errors
    return shown_ranks_.empty() || rank < 0 ? rank : shown_ranks_[static_cast<size_t>(rank)];
  }
  // The deadline of an operation with the timeout `own`; 0: the group's timeout.
  Deadline deadline_for(std::chrono::milliseconds own, Clock::time_point now = Clock::now()) const {
    return Deadline::after(timeout_for(own), now);
  }
  std::chrono::milliseconds timeout_for(std::chrono::milliseconds own) const {
    return own.count() > 0 ? own : timeout();
  }

 private:
  void run_collective(const Operation& operation, Deadline deadline, bool by_waiter);
  // The operation has not begun by its deadline, because others of this group wait for other ranks.
  void fail_late(const Operation& operation, Clock::time_point began);
  void run_parts(const Operation& operation, Deadline deadline, bool by_waiter);
  void all_gather_unequal(const Operation& operation, Deadline deadline, bool by_waiter);
  void reduce_scatter_unequal(const Operation& operation, Deadline deadline, bool by_waiter);
  void all_reduce_sparse(const Operation& operation, Deadline deadline, bool by_waiter);
  WorkPtr make_work(std::shared_ptr<CollectiveQueue> queue, std::vector<Operation> operations, Deadline deadline) const;
  WorkPtr enqueue(std::vector<Operation> operations);
  void hold_memory();  // called while the caller owns a reference to this backend

  // The black box. Tickets have no meaning if there is none.
  uint64_t log_begin(const Operation& operation, shm::BlackBoxState state, Clock::time_point now) const;
  uint64_t log_begin(const SmallCall& call, at::ScalarType dtype, size_t bytes, Clock::time_point now) const;
  void log_done(const SmallCall& call, at::ScalarType dtype, size_t bytes, Clock::time_point began,
                Clock::time_point ended) const;
  shm::BlackBoxEntry entry_of(OpKind kind, int peer, int tag, at::ScalarType dtype, size_t bytes,
                              shm::BlackBoxState state) const;
  void log_end(uint64_t ticket, const std::exception_ptr& error, Clock::time_point now = Clock::now()) const;
  void run_logged(const Operation& operation, Deadline deadline, bool by_waiter, uint64_t ticket);

  const std::string name_, group_name_;
  const std::vector<int> shown_ranks_;
  const std::function<void(const Backend*)> on_leave_;
  const pid_t pid_;
  std::atomic<int64_t> timeout_ms_;
  const std::shared_ptr<OperationCounters> counters_ = std::make_shared<OperationCounters>();
  const std::shared_ptr<CollectiveQueue> queue_;
  const std::shared_ptr<shm::BlackBox> black_box_;
  int black_box_group_ = shm::kNoGroup;
  mutable std::mutex memory_mutex_;
  std::shared_ptr<void> memory_;  // a weak reference to this object, until the membership ends
  bool membership_has_ended_ = false;
};

}  // namespace muster::comm
