// The hierarchical backend: shm inside each host, another backend between the hosts' leaders (their first ranks).
//
//   all_reduce, reduce       sum in each host, between leaders, and back: the network carries each tensor once a host
//   broadcast                between leaders, then in each host
//   all_gather               to the leader, between leaders, and the whole list back
//   reduce_scatter           summed in each host, parts exchanged between leaders, scattered in each host
//   barrier                  in each host, between leaders, in each host
//   gather, scatter,         directly between ranks, over a third group of all of them: each byte has one
//   all_to_all               destination, so there is nothing to save; after a barrier as above, since ranks that call
//                            different operations must not wait for each other in different groups
//   messages                 in a host through its memory; between hosts over that third group
//
// A receive from any source looks into both by turns, and receives after it with its tag wait until it has its message
// (receive_queue.h). Where the group between hosts cannot receive from any source (nccl), it is InvalidArgument.
//
// Reductions add inside hosts first, so their bits may differ from those of other backends where rounding does; they
// are the same on every rank, and in every run with the same ranks on the same hosts. 16-bit floats travel between the
// two steps as float32 and are rounded once.
//
// Who comes last: leaders find out and count (comm/stragglers.h), on a board in the shared memory of their host, which
// its other ranks read. Of a broadcast, a host other than the root's is stood for by its leader: that is whom the other
// hosts wait for. Where the group between hosts cannot tell (nccl), nobody is told.
//
// Each step is announced as the whole operation, so a Mismatch names what was called.
//
// Failure of any of the three groups on any rank is passed on to the others.
//
// A FaultPlan acts at the start of an operation, after its first step inside the host (the phases "posted" and
// "middle"), and at its end. It corrupts nothing.
#pragma once

#include "comm/backends/hierarchical/receive_queue.h"
#include "comm/lane_backend.h"

namespace muster::comm::hierarchical_backend {

class HierarchicalBackend final : public LaneBackend {
 public:
  explicit HierarchicalBackend(const BackendContext& context);
  ~HierarchicalBackend() override { leave({}); }

  void leave(const std::string& cause) override;
  void fail(const Error& cause) override;
  const Stragglers* stragglers() const override;
  std::string straggler_verdict(std::chrono::nanoseconds at_least) const override;

 protected:
  void execute(const Operation& operation, Deadline deadline, bool by_waiter) override;
  void run_message(const Operation& operation, Deadline deadline) override;
  void submit_message(const WorkPtr& work, Deadline deadline) override;
  void check() const override;
  uint64_t next_sequence() const override { return sequence_; }

 private:
  using Inner = c10::intrusive_ptr<Backend>;

  void execute_in_steps(const Operation& operation, Deadline deadline);
  void all_reduce(const Operation& operation, Deadline deadline);
  void broadcast(const Operation& operation, Deadline deadline);
  void all_gather(const Operation& operation, Deadline deadline);
  void reduce_scatter(const Operation& operation, Deadline deadline);
  // One step of `whole` in one of the groups, with the time that is left.
  Operation step(const Operation& whole, OpKind kind, const at::Tensor& tensor, int peer, Deadline deadline) const;
  // Of a tensor with a row for each rank, those of each host's ranks together.
  std::vector<at::Tensor> rows_by_host(const at::Tensor& all) const;
  Deadline last_wait(Deadline deadline) const;
  void run_in_host(const Operation& step);
  void between_hosts(const Operation& step);  // on leaders
  void act_on_faults(FaultPhase phase, Deadline deadline);
  // For `duration`, or until one of the groups is known to have failed, or all others must have given up.
  void stand_still(std::chrono::nanoseconds duration, Deadline deadline) const;
  // Runs fn; an error of one group becomes that of all.
  template <typename Fn>
  void guarded(Fn&& fn);
  Operation routed(const Operation& message, Inner& over) const;
  // Called once, with a message under way and its source, or with an error.
  using Posted = std::function<void(c10::intrusive_ptr<c10d::Work>, int source, std::exception_ptr)>;
  bool must_queue(const Operation& message);
  void queue(const Operation& message, Deadline deadline, Posted posted);
  Taken take_from_any(const Operation& message, Deadline deadline, Clock::time_point began);
  [[noreturn]] void throw_late(const Operation& message, Clock::time_point began) const;
  void complete_after(const WorkPtr& work, const c10::intrusive_ptr<c10d::Work>& under_way, int source);

  bool leads() const { return local_rank_ == 0; }
  int host_of(int rank) const { return host_[static_cast<size_t>(rank)]; }

  std::vector<int> host_;                   // by rank: the number of its host, counted within the group
  std::vector<std::vector<int>> ranks_of_;  // by host: its ranks, in order
  std::vector<int> place_;                  // by rank: its rank within its host
  int own_host_ = 0, local_rank_ = 0;
  const FaultPlan faults_;
  const bool shares_process_;    // with another rank: ranks are threads
  Inner local_, leaders_, all_;  // leaders_ is null on ranks that lead no host
  std::atomic<uint64_t> sequence_{0};
  Deadline deadline_ = Deadline::never();   // of the operation under way, for its thread
  bool first_step_ = true;                  // the next step inside the host is its first
  std::shared_ptr<HostArrivals> arrivals_;  // in memory of local_; leaders write
  std::atomic<bool> has_left_{false};
  std::atomic<bool> local_first_{true};  // where a receive from any source looks first, and there
  std::atomic<int> first_place_{0};
  ReceiveQueue receives_;
};

c10::intrusive_ptr<Backend> create(const BackendContext& context);
std::string why_not();

}  // namespace muster::comm::hierarchical_backend
