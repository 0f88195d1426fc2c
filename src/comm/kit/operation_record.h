// What is kept of an operation on this rank: its entry in the black box, its part of the counters, and its event in a
// profiler.
//
//   OperationCounters   of a group; its works may outlive the backend
//   OperationLog        a group's place in the rank's black box
//   OperationRecord     one blocking operation, for all three
//   WorkRecord          the operations of one work, which has the profiler's event itself (c10d::Work)
//
// Thread-safety: OperationCounters and OperationLog from any thread; the two records from one thread at a time.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/cycles.h"
#include "comm/core/backend_context.h"
#include "comm/core/operation.h"
#include "muster/base/deadline.h"
#include "shm/black_box.h"

namespace muster::comm {

struct OperationCounters {
  struct Counts {
    std::atomic<uint64_t> operations{0}, bytes{0};
    std::atomic<int64_t> blocked_ns{0};

    // By one thread at a time: needs no locked instruction.
    void add(uint64_t size, std::chrono::nanoseconds blocked) {
      add_to(operations, uint64_t{1});
      add_to(bytes, size);
      if (blocked.count() != 0) add_to(blocked_ns, int64_t{blocked.count()});
    }

   private:
    template <typename Number>
    static void add_to(std::atomic<Number>& sum, Number value) {
      sum.store(sum.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
    }
  };
  Counts of_any_thread;
  Counts in_queue;                    // operations in the queue, which run one at a time
  Counts with_lock;                   // messages that are counted while their backend's lock is held
  std::atomic<int64_t> under_way{0};  // works that have not ended

  void count(const Operation& operation);
  void count(uint64_t size) {
    of_any_thread.operations.fetch_add(1, std::memory_order_relaxed);
    of_any_thread.bytes.fetch_add(size, std::memory_order_relaxed);
  }
  uint64_t completed() const { return sum(&Counts::operations); }
  void add_blocked(std::chrono::nanoseconds time) {
    of_any_thread.blocked_ns.fetch_add(time.count(), std::memory_order_relaxed);
  }
  CommStats stats() const;

 private:
  template <typename Number>
  Number sum(std::atomic<Number> Counts::*of) const {
    return (of_any_thread.*of).load(std::memory_order_relaxed) + (in_queue.*of).load(std::memory_order_relaxed) +
           (with_lock.*of).load(std::memory_order_relaxed);
  }
};

// If the rank has no black box, nothing is written, and tickets have no meaning.
class OperationLog {
 public:
  explicit OperationLog(const BackendContext& context);

  // An operation that runs from now on; returns its ticket. `sequence`: the number of a collective in its group; of a
  // message it is ignored.
  uint64_t begin(const Operation& operation, uint64_t sequence, Clock::time_point now) const;
  uint64_t begin(const SmallCall& call, at::ScalarType dtype, size_t bytes, uint64_t sequence,
                 Clock::time_point now) const;
  // One that is queued; start() when it runs.
  uint64_t post(const Operation& operation) const;
  void start(uint64_t ticket, uint64_t sequence) const;
  // `error`: by which it has failed, or null.
  void end(uint64_t ticket, const std::exception_ptr& error, Clock::time_point now = Clock::now()) const;
  // One that is over.
  void add(const SmallCall& call, at::ScalarType dtype, size_t bytes, Clock::time_point began,
           Clock::time_point ended) const;

 private:
  shm::BlackBoxEntry entry_of(OpKind kind, int peer, int tag, at::ScalarType dtype, size_t bytes, uint64_t sequence,
                              shm::BlackBoxState state) const;

  const std::shared_ptr<shm::BlackBox> black_box_;
  int group_ = shm::kNoGroup;
};

class OperationRecord {
 public:
  // The event in the profiler, if one is active, lasts as long as the object. The clock is read only here and at the
  // end of run(), for all that needs the time: each read costs a tenth of a small operation.
  OperationRecord(const OperationLog& log, OperationCounters& counters, const Operation& operation);
  // Of a small call, which runs in the queue while no profiler is active.
  OperationRecord(const OperationLog& log, OperationCounters& counters, const SmallCall& call, at::ScalarType dtype,
                  size_t bytes)
      : log_(log), counters_(counters), small_(&call), dtype_(dtype), bytes_(bytes), began_(FastClock::now()) {}
  OperationRecord(const OperationRecord&) = delete;
  OperationRecord& operator=(const OperationRecord&) = delete;

  Clock::time_point began() const { return began_; }

  // Runs the operation: the entry in the black box is that of body(). Keeps an exception for rethrow().
  template <typename Body>
  void run(uint64_t sequence, Body&& body) noexcept {
    const uint64_t ticket =
        small_ ? log_.begin(*small_, dtype_, bytes_, sequence, began_) : log_.begin(*operation_, sequence, began_);
    try {
      body();
    } catch (...) {
      error_ = std::current_exception();
    }
    const auto ended = FastClock::now_after(began_);
    log_.end(ticket, error_, ended);
    if (!small_)
      counters_.add_blocked(ended - began_);
    else if (!error_)
      counters_.in_queue.add(bytes_, ended - began_);
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void begin_event();

  const OperationLog& log_;
  OperationCounters& counters_;
  const Operation* const operation_ = nullptr;
  const SmallCall* const small_ = nullptr;
  const at::ScalarType dtype_ = at::kByte;
  const size_t bytes_ = 0;
  std::optional<at::RecordFunction> event_;
  Clock::time_point began_;
  std::exception_ptr error_;
};

// Operations that their caller does not wait for. They have their entries in the black box from the beginning, and
// count as under way until end(), or until the record's end if nobody runs them.
class WorkRecord {
 public:
  WorkRecord() = default;  // of no operations
  // `log`: null if the entries are written elsewhere; it need not outlive this object. `running`: the operations are
  // one collective with this number, or messages, and run from now on. Without it, each begins with run().
  WorkRecord(const OperationLog* log, std::shared_ptr<OperationCounters> counters,
             std::span<const Operation> operations, std::optional<uint64_t> running);
  WorkRecord(const WorkRecord&) = delete;
  WorkRecord& operator=(const WorkRecord&) = delete;
  ~WorkRecord();

  // Runs the next operation: it is running in the black box while body() does. Returns what body() has thrown, or null.
  template <typename Body>
  std::exception_ptr run(uint64_t sequence, Body&& body) noexcept {
    if (log_) log_->start(tickets_[ended_], sequence);
    std::exception_ptr error;
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
    end_next(error);
    return error;
  }
  // Ends the operations that have not ended, by `error` or, if it is null, as done. Once.
  void end(const std::exception_ptr& error);

 private:
  void end_next(const std::exception_ptr& error) {
    if (log_) log_->end(tickets_[ended_], error);
    ++ended_;
  }

  const std::optional<OperationLog> log_;
  const std::shared_ptr<OperationCounters> counters_;
  std::vector<uint64_t> tickets_;
  size_t ended_ = 0;
  bool over_ = true;
};

// The size of this rank's payload.
size_t bytes_of(const Operation& operation);
// "muster:all_reduce", as profilers show it; never freed.
const char* profiling_title(const Operation& operation);
// The tensors whose shapes a profiler shows: the inputs, as with PyTorch's own backends.
std::vector<at::Tensor> profiled_inputs(std::span<const Operation> operations);
// Whether a profiler is active.
bool profiling();

}  // namespace muster::comm
