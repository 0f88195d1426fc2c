// An operation under way.
//
// Work is a shared handle. Dropping it neither cancels nor waits: the operation goes on and keeps its tensors alive.
// Until it has completed, do not read its outputs and do not write its inputs or outputs.
//
// Thread-safety: any thread may call any method.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>

namespace c10d {
class Work;
}

namespace muster {

class Work {
 public:
  Work();  // an operation that has completed
  explicit Work(c10::intrusive_ptr<c10d::Work> work);
  Work(const Work&);
  Work(Work&&) noexcept;
  Work& operator=(const Work&);
  Work& operator=(Work&&) noexcept;
  ~Work();

  // Blocks until the operation has completed; throws its error (Mismatch, PeerLost, TimeoutError, Aborted). The
  // deadline is that of the operation, from the time when it was issued.
  void wait();
  // As wait(), but returns false when `timeout` has passed first; the operation goes on.
  bool wait_for(std::chrono::milliseconds timeout);
  // Whether the operation has completed, successfully or with an error. Never blocks.
  bool is_completed() const;
  // For a receive from any source: the rank it came from. Otherwise -1.
  int source_rank() const;

  const c10::intrusive_ptr<c10d::Work>& c10d_work() const { return work_; }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace muster
