// The hierarchical backend: shm inside each host, another backend between the hosts' leaders (their first ranks).
//
//   all_reduce, reduce       sum in each host, between leaders, and back: the network carries each tensor once per host
//   broadcast                between leaders, then in each host
//   all_gather               in each host, between leaders, and what came from other hosts in each host
//   reduce_scatter           summed in each host, parts exchanged between leaders, scattered in each host
//   barrier                  in each host, between leaders, in each host
//   gather, scatter,         directly between ranks, over a third group of all of them: each byte has one
//   all_to_all               destination, so there is nothing to save; after a barrier as above, since ranks that call
//                            different operations must not wait for each other in different groups
//   messages                 in a host through its memory; between hosts over that third group
//
// Large tensors of all_reduce, reduce and broadcast move in blocks: while one block travels between the hosts, each
// host sums the next one and hands out the previous one. A leader does both on the thread that executes the operation.
//
// A receive from any source looks alternately into the host's group and the third group. Later receives with its tag
// wait until it has its message (receive_queue.h). If the group between hosts cannot receive from any source, such a
// receive throws InvalidArgument.
//
// Reductions add inside hosts first, so rounding may make their bits differ from those of other backends. The bits are
// the same on every rank, and in every run with the same ranks on the same hosts. 16-bit floats travel between the two
// steps as float32 and are rounded once.
//
// Who comes last: the leaders find that out and count it (comm/core/stragglers.h) on a board in their host's shared
// memory, which the host's other ranks read. In a broadcast, the leader counts as the last rank of a host that does not
// have the root, because the other hosts wait only for the leader. If the group between hosts cannot tell, no rank
// can.
//
// Each step is announced as the whole operation, so a Mismatch names the operation that the user called.
//
// A failure of any of the three groups on any rank is passed on to the other groups.
//
// A FaultPlan acts at the start of an operation, after its first step inside the host (the phases "posted" and
// "middle"), and at its end. It corrupts nothing.
#pragma once

#include "base/text.h"
#include "comm/backends/hierarchical/receive_queue.h"
#include "comm/core/backend_context.h"
#include "comm/kit/queued_backend.h"
#include "muster/base/error.h"

namespace muster::comm::hierarchical_backend {

class HierarchicalBackend final : public QueuedBackend {
 public:
  explicit HierarchicalBackend(const BackendContext& context);
  ~HierarchicalBackend() override { leave({}); }

  const Stragglers* stragglers() const override;
  std::string straggler_report(std::chrono::nanoseconds at_least) const override;

 protected:
  void execute(const Operation& operation, Deadline deadline, bool by_waiter) override;
  void run_message(const Operation& operation, Deadline deadline) override;
  void submit_message(const WorkPtr& work, Deadline deadline) override;
  void check() const override;
  bool failed() const override;
  std::exception_ptr known_failure() override;
  void require_possible(const Operation& operation) const override;
  void leave_group(const std::string& cause) override;
  void end_threads() override { receives_.stop(); }
  void fail_group(const Error& cause) override;
  uint64_t next_sequence() const override { return sequence_; }

 private:
  using Inner = c10::intrusive_ptr<Backend>;

  void execute_in_steps(const Operation& operation, Deadline deadline);
  void all_reduce(const Operation& operation, Deadline deadline);  // and reduce
  void broadcast(const Operation& operation, Deadline deadline);
  void all_gather(const Operation& operation, Deadline deadline);
  void reduce_scatter(const Operation& operation, Deadline deadline);
  // The steps of an operation: inside the host, between the hosts (on leaders), and inside the host again. Those inside
  // the host are for a part of the tensor: where it begins, and its length, in elements.
  struct Steps {
    std::function<void(int64_t begin, int64_t length)> first;
    std::function<Operation()> between;
    std::function<void(int64_t begin, int64_t length)> last;
  };
  // Takes the steps block by block (comm/core/operation.h). A step inside the host after the first one waits as long as
  // the last one, because its leader may wait for other hosts meanwhile.
  void in_blocks(const at::Tensor& tensor, const Steps& steps);
  // Makes one step of `whole` for one of the groups, with the time that is left.
  Operation step(const Operation& whole, OpKind kind, const at::Tensor& tensor, int peer, Deadline deadline) const;
  // Cuts a tensor that has a row for each rank, ordered by host, into the rows of each host.
  std::vector<at::Tensor> rows_by_host(const at::Tensor& all) const;
  // The parts of an all_gather or reduce_scatter as such a tensor, if they lie in memory like that; else an undefined
  // one. Which it is may differ between ranks.
  at::Tensor parts_by_host(const std::vector<at::Tensor>& parts, int64_t count) const;
  // Calls copy(part, row, bytes) for each rank's part and its row in such a tensor.
  template <typename Copy>
  void for_parts(const std::vector<at::Tensor>& parts, const at::Tensor& rows, Copy&& copy) const;
  static Deadline later(Deadline deadline, int steps);  // of a step that comes so many waits later
  Deadline last_wait(Deadline deadline) const;
  void run_in_host(const Operation& step);
  void after_first_step() const;              // inside the host: injected faults act
  void between_hosts(const Operation& step);  // only on leaders
  // The rank that came last on this host to an operation, and how much later than the rank before it.
  struct LastHere {
    int rank = 0;
    std::chrono::nanoseconds late{0};
  };
  LastHere find_last() const;            // to the step inside the host before; only on leaders
  void tell_last(const LastHere& last);  // with the next operation between the hosts
  // Runs fn. An error of one group becomes the error of all three.
  template <typename Fn>
  void guarded(Fn&& fn);
  Operation routed(const Operation& message, Inner& over) const;
  // Called once, with the work of a message under way and its source, or with an error.
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
  bool by_host_ = true;          // whether the ranks are numbered host by host
  Inner local_, leaders_, all_;  // leaders_ is null on ranks that are not leaders
  std::atomic<uint64_t> sequence_{0};
  Deadline deadline_ = Deadline::never();   // of the operation under way; only its thread uses it
  bool first_step_ = true;                  // the next step inside the host is its first
  std::shared_ptr<HostArrivals> arrivals_;  // in the memory of local_; leaders write it
  std::atomic<bool> local_first_{true};     // whether a receive from any source looks into local_ first
  std::atomic<int> first_place_{0};         // the rank of local_ with which it begins
  ReceiveQueue receives_{[this] { return memory(); }};
};

template <typename Fn>
void HierarchicalBackend::guarded(Fn&& fn) {
  try {
    fn();
  } catch (const InvalidArgument&) {
    throw;
  } catch (const Error& error) {
    if (!has_left()) fail(error);  // if it has, the others learn that
    std::rethrow_exception(as_own(error));
  } catch (const std::exception& error) {
    fail(Unavailable(text("rank ", shown(getRank()), " failed: ", error.what())));
    throw;
  }
}

c10::intrusive_ptr<Backend> create(const BackendContext& context);
std::string unavailable_reason();

}  // namespace muster::comm::hierarchical_backend
