// The fake backend: one rank runs alone in a world of any size. No data moves and no rank is waited for, so a program's
// shapes, memory and order of operations can be tested for 1,024 ranks on a laptop. Results are as if every rank had
// this rank's data, and as if reductions had one contribution. They have the right shape, but no other meaning.
//
// Operations are validated, counted, profiled and written to the black box as on any backend.
#pragma once

#include "comm/core/backend_context.h"
#include "comm/kit/queued_backend.h"

namespace muster::comm::fake_backend {

class FakeBackend final : public QueuedBackend {
 public:
  explicit FakeBackend(const BackendContext& context) : QueuedBackend(context, "fake") {}
  ~FakeBackend() override { leave({}); }

 protected:
  void execute(const Operation& operation, Deadline deadline, bool by_waiter) override;
  void run_message(const Operation& operation, Deadline deadline) override;
  void submit_message(const WorkPtr& work, Deadline deadline) override;
  void check() const override;
  bool failed() const override;
  void leave_group(const std::string& cause) override;
  void fail_group(const Error& cause) override;
  uint64_t next_sequence() const override { return sequence_; }

 private:
  std::atomic<uint64_t> sequence_{0};
  mutable std::mutex mutex_;
  std::exception_ptr failure_;
};

c10::intrusive_ptr<Backend> create(const BackendContext& context);
std::string unavailable_reason();

}  // namespace muster::comm::fake_backend
