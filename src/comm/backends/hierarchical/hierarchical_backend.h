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
// A receive from any source would have to listen to two wires at once; it is InvalidArgument.
//
// Reductions add inside hosts first, so their bits may differ from those of other backends where rounding does; they
// are the same on every rank, and in every run with the same ranks on the same hosts. 16-bit floats travel between the
// two steps as float32 and are rounded once.
//
// Each step is announced as the whole operation, so a Mismatch names what was called.
//
// Failure of any of the three groups on any rank is passed on to the others.
#pragma once

#include "comm/lane_backend.h"

namespace muster::comm::hierarchical_backend {

class HierarchicalBackend final : public LaneBackend {
 public:
  explicit HierarchicalBackend(const BackendContext& context);
  ~HierarchicalBackend() override { leave({}); }

  void leave(const std::string& cause) override;
  void fail(const Error& cause) override;
  void abort() override;
  void shutdown() override { leave({}); }
  void release_resources() override { leave({}); }

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
  // Runs fn; an error of one group becomes that of all.
  template <typename Fn>
  void guarded(Fn&& fn);
  Operation routed(const Operation& message, Inner& over) const;

  bool leads() const { return local_rank_ == 0; }
  int host_of(int rank) const { return host_[static_cast<size_t>(rank)]; }

  std::vector<int> host_;                   // by rank: the number of its host, counted within the group
  std::vector<std::vector<int>> ranks_of_;  // by host: its ranks, in order
  std::vector<int> place_;                  // by rank: its rank within its host
  int own_host_ = 0, local_rank_ = 0;
  Inner local_, leaders_, all_;  // leaders_ is null on ranks that lead no host
  std::atomic<uint64_t> sequence_{0};
  std::atomic<bool> has_left_{false};
  const std::function<void(const Backend*)> on_leave_;
};

c10::intrusive_ptr<Backend> create(const BackendContext& context);
std::string why_not();

}  // namespace muster::comm::hierarchical_backend
