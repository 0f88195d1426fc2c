// The shm backend: all ranks on one host, in shared memory. This class takes tensors; collectives.h and messages.h do
// the work on bytes.
//
// Takes dense CPU tensors.
#pragma once

#include <atomic>

#include "comm/backends/shm/channel.h"
#include "comm/backends/shm/collectives.h"
#include "comm/backends/shm/messages.h"
#include "comm/core/backend_context.h"
#include "comm/kit/queued_backend.h"

namespace muster::comm::shm_backend {

class ShmBackend final : public QueuedBackend {
 public:
  explicit ShmBackend(const BackendContext& context);
  ~ShmBackend() override;

  bool run_small(const SmallCall& call) override;
  Taken take_message(const Operation& receive, int from) override;
  const Stragglers* stragglers() const override { return &channel_.stragglers(); }
  std::span<std::atomic<uint64_t>> board() override { return channel_.board(); }

 protected:
  void require_possible(const Operation& operation) const override;
  void execute(const Operation& operation, Deadline deadline, bool by_waiter) override;
  void run_message(const Operation& operation, Deadline deadline) override;
  void submit_message(const WorkPtr& work, Deadline deadline) override;
  void check() const override { channel_.check(); }
  bool failed() const override { return channel_.failed(); }
  void leave_group(const std::string& cause) override { channel_.leave(cause); }
  void end_threads() override { messages_.stop(); }
  void fail_group(const Error& cause) override;
  uint64_t next_sequence() const override { return channel_.seq(); }
  std::string last_operation() const override { return channel_.where(getRank()); }

 private:
  void execute_call(const Call& call);
  std::shared_ptr<Message> make_message(const Operation& operation, const at::Tensor& contiguous,
                                        Deadline deadline) const;
  void submit_to(const WorkPtr& work, Deadline deadline, const std::function<void(std::shared_ptr<Message>)>& submit);
  uint64_t heap_offset(ConstBytes data, size_t bytes) const;
  uint64_t contribution_on_heap(const ByteCall& call) const;
  bool run_small_message(const SmallCall& call);
  void retire_posted(const Message& receive) const;

  Channel channel_;
  const std::shared_ptr<shm::Arena> arena_;
  Messages messages_;
};

c10::intrusive_ptr<Backend> create(const BackendContext& context);
std::string unavailable_reason();

}  // namespace muster::comm::shm_backend
