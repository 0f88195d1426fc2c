// The part that backends share which execute operations themselves, in order, on their own threads: validation,
// deadlines, the lane, works, counters; and the operations that are made of others:
//
//   all_gather with unequal parts        a broadcast from each rank
//   reduce_scatter with unequal parts    a reduce to each rank
//   PREMUL_SUM                           a multiplication, then the sum
//   sparse all_reduce                    all_gather of shapes, indices and values, added in rank order
//
// So a backend implements execute() for the plain collectives, and messages.
//
// Thread-safety: as Backend.
#pragma once

#include <atomic>
#include <memory>

#include "base/cycles.h"
#include "comm/backend.h"
#include "comm/lane.h"
#include "comm/operation_work.h"
#include "muster/base/deadline.h"
#include "shm/black_box.h"

namespace muster::comm {

class LaneBackend : public Backend {
 public:
  LaneBackend(const BackendContext& context, std::string name);

  void run(const Operation& operation) final;
  c10::intrusive_ptr<c10d::Work> submit(Operation operation) final;
  c10::intrusive_ptr<c10d::Work> submit_batch(std::vector<Operation> operations) final;
  CommStats stats() const final { return counters_->stats(); }
  const std::string& group_name() const final { return group_name_; }
  std::chrono::milliseconds timeout() const final {
    return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  }

  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ms_ = timeout.count(); }
  uint64_t getSequenceNumberForGroup() override { return counters_->completed(); }
  void setSequenceNumberForGroup() override {}  // numbers start at 0 on all ranks

 protected:
  using WorkPtr = c10::intrusive_ptr<OperationWork>;

  // A collective, on the calling thread, which belongs to somebody who waits for it or is the lane's.
  virtual void execute(const Operation& operation, Deadline deadline, bool by_waiter) = 0;
  virtual void run_message(const Operation& operation, Deadline deadline) = 0;
  // Calls work->complete() sooner or later.
  virtual void submit_message(const WorkPtr& work, Deadline deadline) = 0;
  // Throws the failure of a group that has failed.
  virtual void check() const = 0;
  // The number, from 0, of the collective that execute() would do next, as its messages name it.
  virtual uint64_t next_sequence() const = 0;

  // The frame of a small call: its turn in the lane, the black box, the counters. `body(deadline)` runs it. False, and
  // nothing has been done, where the lane is busy or a profiler looks.
  template <typename Body>
  bool run_framed(const SmallCall& call, at::ScalarType dtype, size_t bytes, Body&& body) {
    if (profiling() || !lane_->try_take()) return false;
    const auto began = FastClock::now();
    const uint64_t ticket = log_begin(call, dtype, bytes, began);
    std::exception_ptr error;
    try {
      body(Deadline::after(call.timeout.count() > 0 ? call.timeout : timeout(), began));
    } catch (...) {
      error = std::current_exception();
    }
    const auto ended = FastClock::now();
    log_end(ticket, error, ended);
    if (!error) counters_->count_in_lane(bytes, ended - began);
    lane_->give_back();
    if (error) std::rethrow_exception(error);
    return true;
  }

  // The same for a message, which needs no lane: `body()` returns whether it has done it.
  template <typename Body>
  bool run_message_framed(const SmallCall& call, at::ScalarType dtype, size_t bytes, Body&& body) {
    if (profiling()) return false;
    const auto began = FastClock::now();
    if (!body()) return false;
    const auto ended = FastClock::now();
    log_end(log_begin(call, dtype, bytes, began), nullptr, ended);
    counters_->operations.fetch_add(1, std::memory_order_relaxed);
    counters_->bytes.fetch_add(bytes, std::memory_order_relaxed);
    counters_->add_blocked(ended - began);
    return true;
  }

  void count(const Operation& operation) { counters_->count(operation); }
  void stop_lane() { lane_->stop(); }  // in the destructor of what derives, before what execute() needs is gone
  Deadline deadline_for(const Operation& operation, Clock::time_point now = Clock::now()) const;

 private:
  void run_collective(const Operation& operation, Deadline deadline, bool by_waiter);
  void all_gather_unequal(const Operation& operation, Deadline deadline, bool by_waiter);
  void reduce_scatter_unequal(const Operation& operation, Deadline deadline, bool by_waiter);
  void all_reduce_sparse(const Operation& operation, Deadline deadline, bool by_waiter);
  WorkPtr make_work(std::shared_ptr<Lane> lane, std::vector<Operation> operations) const;
  WorkPtr enqueue(std::vector<Operation> operations);

  // The black box. Tickets are of no meaning where there is none.
  uint64_t log_begin(const Operation& operation, shm::BlackBoxState state, Clock::time_point now) const;
  uint64_t log_begin(const SmallCall& call, at::ScalarType dtype, size_t bytes, Clock::time_point now) const {
    if (!black_box_) return 0;
    const bool message = is_message(call.kind),
               rooted = message || call.kind == OpKind::kBroadcast || call.kind == OpKind::kReduce;
    return black_box_->begin({.group = black_box_group_,
                              .operation = static_cast<uint8_t>(call.kind),
                              .dtype = static_cast<uint8_t>(dtype),
                              .bytes = bytes,
                              .sequence = message ? shm::kNoSequence : next_sequence(),
                              .peer = rooted ? call.peer : -1,
                              .tag = static_cast<uint64_t>(call.tag)},
                             static_cast<uint64_t>(now.time_since_epoch().count()));
  }
  void log_end(uint64_t ticket, const std::exception_ptr& error, Clock::time_point now = Clock::now()) const;
  void run_logged(const Operation& operation, Deadline deadline, bool by_waiter, uint64_t ticket);

  const std::string name_, group_name_;
  std::atomic<int64_t> timeout_ms_;
  const std::shared_ptr<OperationCounters> counters_ = std::make_shared<OperationCounters>();
  const std::shared_ptr<Lane> lane_;
  const std::shared_ptr<shm::BlackBox> black_box_;
  int black_box_group_ = shm::kNoGroup;
};

}  // namespace muster::comm
