// The part that is common to backends that execute operations themselves, in order, on their own threads: validation,
// deadlines, the queue, works, counters, the black box, injected faults, the life cycle of a membership, and the
// operations that are made of others:
//
//   all_gather with unequal parts        a broadcast from each rank
//   reduce_scatter with unequal parts    a reduce to each rank
//   PREMUL_SUM                           a multiplication, then the sum
//   sparse all_reduce                    all_gather of shapes, indices and values, added in rank order
//
// A derived backend implements execute() for the plain collectives, messages, and how its ranks tell each other of a
// failure or a departure. Its destructor calls leave(), before what execute() needs is destroyed.
//
// Thread-safety: as Backend.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/cycles.h"
#include "base/fork_count.h"
#include "comm/core/backend.h"
#include "comm/core/backend_context.h"
#include "comm/kit/collective_queue.h"
#include "comm/kit/failure_note.h"
#include "comm/kit/fault_injector.h"
#include "comm/kit/operation_record.h"
#include "comm/kit/operation_work.h"
#include "muster/base/deadline.h"

namespace muster::comm {

class QueuedBackend : public Backend {
 public:
  QueuedBackend(const BackendContext& context, std::string name);

  void run(const Operation& operation) final;
  c10::intrusive_ptr<c10d::Work> submit(Operation operation) final;
  c10::intrusive_ptr<c10d::Work> submit_batch(std::vector<Operation> operations) final;
  std::vector<c10::intrusive_ptr<c10d::Work>> submit_messages(std::vector<Operation> messages) override;
  CommStats stats() const final { return counters_->stats(); }
  bool is_idle() const final { return counters_->under_way.load(std::memory_order_acquire) == 0; }
  const std::string& group_name() const final { return group_name_; }
  std::chrono::milliseconds timeout() const final {
    return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  }

  // Throws the failure of a group that has failed.
  virtual void check() const = 0;
  // Whether this rank knows that the group has failed or ends; without looking far.
  virtual bool failed() const = 0;

  // InvalidArgument for what is valid, and this backend cannot do.
  virtual void require_possible(const Operation&) const {}

  void leave(const std::string& cause) final;
  void fail(const Error& cause) final;
  std::exception_ptr known_failure() override;

  const std::string getBackendName() const override { return name_; }
  void abort() final;
  void shutdown() final { leave({}); }
  void release_resources() final { leave({}); }  // called instead of the destructor if weak references are left
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ms_ = timeout.count(); }
  // Aborted if this process is a fork of the member: its operations would be taken for the parent's.
  void check_fork() const {
    if (forks_ != fork_count()) throw_forked();
  }

 protected:
  using WorkPtr = c10::intrusive_ptr<OperationWork>;

  // Executes a collective on the calling thread. That is a thread that waits for it (by_waiter), or the queue's thread.
  virtual void execute(const Operation& operation, Deadline deadline, bool by_waiter) = 0;
  virtual void run_message(const Operation& operation, Deadline deadline) = 0;
  // Calls work->complete() sooner or later.
  virtual void submit_message(const WorkPtr& work, Deadline deadline) = 0;
  // The number, from 0, of the next collective of execute(), as it appears in error messages.
  virtual uint64_t next_sequence() const = 0;
  // Tells the others that this rank leaves, and why, and makes its operations fail. May be called twice: by an injected
  // fault on the thread that executes a collective, and by leave().
  virtual void leave_group(const std::string& cause) = 0;
  // Ends the backend's own threads, after leave_group().
  virtual void end_threads() {}
  // Makes the group fail on all ranks, unless it has failed already.
  virtual void fail_group(const Error& cause) = 0;

  // A backend calls faults().at() in the phases kPosted and kMiddle of a collective.
  const FaultInjector& faults() const { return faults_; }

  // The frame of a small call: its turn in the queue, the black box, the counters. `body(deadline)` executes the call.
  // Returns false, without having done anything, if the queue is busy or a profiler is active.
  template <typename Body>
  bool run_framed(const SmallCall& call, at::ScalarType dtype, size_t bytes, Body&& body) {
    check_fork();
    if (profiling() || !queue_->try_take()) return false;
    OperationRecord record(log_, *counters_, call, dtype, bytes);
    record.run(next_sequence(), [&] {
      const Deadline deadline = deadline_for(call.timeout, record.began());
      with_faults(deadline, [&] { body(deadline); });
    });
    queue_->give_back();
    record.rethrow();
    return true;
  }

  // The same for a message, which needs no queue: `body(waits, ends)` returns whether it has done it. It calls ends() at
  // the end, with the lock that all messages of this backend take, and waits() if it takes long, so that an entry in the
  // black box says so.
  template <typename Body>
  bool run_message_framed(const SmallCall& call, at::ScalarType dtype, size_t bytes, Body&& body) {
    check_fork();
    if (profiling()) return false;
    const auto self = c10::intrusive_ptr<QueuedBackend>::unsafe_reclaim_from_nonowning(this);  // run() says why
    const auto began = FastClock::now();
    std::optional<uint64_t> ticket;
    auto ended = began;
    try {
      const auto waits = [&] { ticket = log_.begin(call, dtype, bytes, shm::kNoSequence, began); };
      const auto ends = [&] {
        // A send that is done here has not waited; reading the clock again would take as long as the send.
        if (call.kind != OpKind::kSend) ended = FastClock::now_after(began);
        counters_->with_lock.add(bytes, ended - began);
      };
      if (!body(waits, ends)) return false;
    } catch (...) {
      if (ticket) log_.end(*ticket, std::current_exception());
      throw;
    }
    if (ticket) [[unlikely]]
      log_.end(*ticket, nullptr, ended);
    else
      log_.add(call, dtype, bytes, began, ended);
    return true;
  }

  void hold_memory();  // for memory(); called while the caller owns a reference to this backend
  // Makes the work of a message. The caller completes it, and writes its entries in the black box.
  WorkPtr make_message_work(Operation message) {
    hold_memory();
    const Deadline deadline = deadline_for(message.timeout);
    return make_work(nullptr, nullptr, {std::move(message)}, deadline);
  }
  void count(const Operation& operation) { counters_->count(operation); }
  // Keeps this object's memory for a thread of the backend that runs callbacks of messages. A callback may release the
  // last reference to the backend: then release_resources() ends the membership inside the callback, and the thread
  // finds the object still there when the callback returns. Null before the first message, and after the membership.
  std::shared_ptr<void> memory() const;
  bool has_left() const { return has_left_; }
  [[noreturn]] void throw_forked() const;
  bool in_fork() const;  // this process is a fork of the member; the membership belongs to its parent
  int shown_rank(int rank) const final { return shown(rank); }
  int shown(int rank) const {  // the number of `rank` in messages and errors
    return shown_ranks_.empty() || rank < 0 ? rank : shown_ranks_[static_cast<size_t>(rank)];
  }
  // A failure that this rank has found, or one of a group that this one is made of, as this rank throws it.
  std::exception_ptr as_own(const Error& error) const;
  FailureReport own_end(const std::string& cause) const;  // what the others see if this rank leaves because of an error
  // For the texts of failures: this rank's last collective, as "all_reduce #12". Any thread.
  virtual std::string last_operation() const;
  void set_last_operation(OpKind kind, uint64_t number) {
    last_operation_.store((number + 1) << 8 | static_cast<uint8_t>(kind), std::memory_order_relaxed);
  }
  // The deadline of an operation with the timeout `own`; 0: the group's timeout.
  Deadline deadline_for(std::chrono::milliseconds own, Clock::time_point now = FastClock::now()) const {
    return Deadline::after(timeout_for(own), now);
  }
  std::chrono::milliseconds timeout_for(std::chrono::milliseconds own) const {
    return own.count() > 0 ? own : timeout();
  }

 private:
  template <typename Execute>
  void with_faults(Deadline deadline, Execute&& execute) {
    if (!faults_.any() || failed()) [[likely]]
      return execute();
    const uint64_t operation = next_sequence();
    faults_.at(FaultPhase::kStart, operation, deadline);
    execute();
    faults_.at(FaultPhase::kEnd, operation, deadline);
  }
  void require_valid(const Operation& operation) const;
  void end_membership();
  void execute_one(const Operation& operation, Deadline deadline, bool by_waiter);
  void run_collective(const Operation& operation, Deadline deadline, bool by_waiter);
  // The operation has not begun by its deadline, because others of this group wait for other ranks.
  void fail_late(const Operation& operation, Clock::time_point began);
  void run_parts(const Operation& operation, Deadline deadline, bool by_waiter);
  void all_gather_unequal(const Operation& operation, Deadline deadline, bool by_waiter);
  void reduce_scatter_unequal(const Operation& operation, Deadline deadline, bool by_waiter);
  void all_reduce_sparse(const Operation& operation, Deadline deadline, bool by_waiter);
  WorkPtr make_work(const OperationLog* log, std::shared_ptr<CollectiveQueue> queue, std::vector<Operation> operations,
                    Deadline deadline) const;
  WorkPtr enqueue(std::vector<Operation> operations);
  const std::string name_, group_name_;
  const std::vector<int> shown_ranks_;
  std::atomic<uint64_t> last_operation_{0};  // its kind | (its number + 1) << 8; 0: none yet
  const std::function<void(const Backend*)> on_leave_;
  const pid_t pid_;
  const int forks_ = fork_count();
  std::atomic<int64_t> timeout_ms_;
  std::atomic<bool> has_left_{false};
  const FaultInjector faults_;
  const std::shared_ptr<OperationCounters> counters_ = std::make_shared<OperationCounters>();
  const std::shared_ptr<CollectiveQueue> queue_;
  const OperationLog log_;
  mutable std::mutex memory_mutex_;
  std::shared_ptr<void> memory_;  // a weak reference to this object, until the membership ends
  bool membership_has_ended_ = false;
};

}  // namespace muster::comm
