// The shm backend: all ranks on one host, in shared memory. The way in for tensors; the work is done on bytes by
// collectives.h and messages.h.
//
// Takes dense CPU tensors. Non-contiguous ones pass through a contiguous copy, here and nowhere else.
#pragma once

#include <atomic>
#include <mutex>

#include "comm/backend.h"
#include "comm/backends/shm/channel.h"
#include "comm/backends/shm/collectives.h"
#include "comm/backends/shm/messages.h"
#include "comm/lane.h"

namespace muster::comm::shm_backend {

class ShmBackend final : public Backend {
 public:
  explicit ShmBackend(const BackendContext& context);
  ~ShmBackend() override;

  void run(const Operation& operation) override;
  c10::intrusive_ptr<c10d::Work> submit(Operation operation) override;
  CommStats stats() const override;
  void leave(const std::string& cause) override;

  const std::string getBackendName() const override { return "shm"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ms_ = timeout.count(); }
  uint64_t getSequenceNumberForGroup() override { return counters_->operations.load(std::memory_order_relaxed); }
  void setSequenceNumberForGroup() override {}  // numbers start at 0 on all ranks
  void abort() override;
  void shutdown() override { leave({}); }

 private:
  class ShmWork;
  struct Counters {
    std::atomic<uint64_t> operations{0}, bytes{0};
    std::atomic<int64_t> blocked_ns{0};
    void add_blocked(std::chrono::nanoseconds time) { blocked_ns.fetch_add(time.count(), std::memory_order_relaxed); }
  };

  void validate(const Operation& operation) const;
  void execute(const Operation& operation, Deadline deadline);  // a collective, on the calling thread
  void execute_checked(const Operation& operation, Deadline deadline);
  std::shared_ptr<Message> make_message(const Operation& operation, const at::Tensor& contiguous,
                                        Deadline deadline) const;
  Deadline deadline_for(const Operation& operation) const;
  uint64_t heap_offset(const void* data, size_t bytes) const;
  void count(const Operation& operation);

  Channel channel_;
  const std::shared_ptr<shm::Arena> arena_;
  std::atomic<int64_t> timeout_ms_;
  const std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
  std::atomic<bool> has_left_{false};
  std::mutex quarantine_mutex_;
  std::vector<at::Tensor> quarantine_;
  Messages messages_;
  Lane lane_;
};

c10::intrusive_ptr<Backend> create(const BackendContext& context);
std::string why_not();

}  // namespace muster::comm::shm_backend
