// The interface of a backend, which executes a group's collectives and messages.
//
// Every backend derives from this class, which derives from c10d::Backend, so PyTorch's own code (and Python) can use
// it. Two functions take any operation as one struct: run() blocks and does not allocate, submit() returns immediately.
// c10d/bridge.cpp translates the many virtuals of c10d::Backend to Operations, so a backend implements only these two.
//
// Thread-safety: run(), submit() and stats() from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/core/operation.h"
#include "muster/base/error.h"
#include "muster/comm/group.h"

namespace muster::comm {

class Stragglers;

// Whether this thread is in a callback of an operation's future.
bool in_callback_of_future();

class Backend : public c10d::Backend {
 public:
  using c10d::Backend::Backend;

  // Executes the call if it is small and plain. If it returns false, the caller must call run(), which also validates.
  virtual bool run_small(const SmallCall&) { return false; }

  virtual void run(const Operation& operation) = 0;
  virtual c10::intrusive_ptr<c10d::Work> submit(Operation operation) = 0;
  // Several collectives, one after another, as one piece of work; at least one.
  virtual c10::intrusive_ptr<c10d::Work> submit_batch(std::vector<Operation> operations) = 0;
  // Several messages that begin together: with NCCL, two ranks can send to each other only so.
  virtual std::vector<c10::intrusive_ptr<c10d::Work>> submit_messages(std::vector<Operation> messages);
  virtual CommStats stats() const = 0;
  virtual const std::string& group_name() const = 0;                // "world", "group 1"
  virtual const Stragglers* stragglers() const { return nullptr; }  // null: this backend cannot tell
  virtual std::string straggler_report(std::chrono::nanoseconds at_least) const;
  // At the end of a group: its rank 0 logs who was last by a second or more in all.
  void warn_of_straggler() const;
  // Memory that all ranks of the group share: BackendOptions::board words, initially 0. Empty if the backend has none.
  virtual std::span<std::atomic<uint64_t>> board() { return {}; }
  // Whether no asynchronous operation is under way.
  virtual bool is_idle() const { return true; }
  // This rank ends its membership. If an error ends it, `cause` is not empty, and peers see it. Operations under way
  // fail.
  virtual void leave(const std::string& cause) = 0;
  // Makes the group fail with `cause` on all its ranks, unless it has failed already.
  virtual void fail(const Error& cause) = 0;
  // Why the group has failed, if this rank or, as far as it can tell now, another one knows it; else null, and after
  // leave(). May ask the store, for seconds.
  virtual std::exception_ptr known_failure() { return nullptr; }
  // For a backend that is made of several groups. `receive` is from any source. If a message with its tag has come that
  // no other receive wants, takes it and returns a work like submit(). Of several such messages it takes the one from
  // the first source in the order from, from + 1, …. If none has come, the work is null and nothing stays pending.
  // Throws the group's failure; InvalidArgument if the backend does not support receives from any source.
  struct Taken {
    c10::intrusive_ptr<c10d::Work> work;
    int source = kAnySource;
    bool all_gone = false;  // with a null work: no message will come, because all other ranks have left
  };
  virtual Taken take_message(const Operation& receive, int from);
  // Whether operations may have Operation::blocks.
  virtual bool takes_blocks() const { return false; }
  // The timeout of operations that have none of their own.
  virtual std::chrono::milliseconds timeout() const = 0;

  // c10d's interface, implemented with the functions above. If the caller says that it will wait (asyncOp = false), the
  // operation runs immediately, on the caller's thread.
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>&, const c10d::ReduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&,
                                           const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&,
                                        const c10d::GatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>&, std::vector<std::vector<at::Tensor>>&,
                                         const c10d::ScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>&, std::vector<std::vector<at::Tensor>>&,
                                                const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor&, at::Tensor&,
                                                      const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                                               const c10d::AllToAllOptions&) override;
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>&,
                                                     const c10d::AllreduceCoalescedOptions&) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&,
                                                     const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>&, std::vector<at::Tensor>&,
                                                                 const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>&, std::vector<at::Tensor>&,
                                                                 const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>&, std::vector<at::Tensor>&,
                                          const c10d::AllToAllOptions&) override;
  void monitoredBarrier(const c10d::BarrierOptions&, bool wait_all_ranks) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>&, int, int) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>&, int, int) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>&, int) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override;
  // The number of collectives that were called through c10d's interface, from 0 on all ranks. ProcessGroupWrapper
  // compares it before each, so it does not depend on how many of them are complete.
  uint64_t getSequenceNumberForGroup() override { return called_.load(std::memory_order_relaxed); }
  void setSequenceNumberForGroup() override {}
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(getBackendName(), timeout());
  }
  void enableCollectivesTiming() override {}  // stats() and the profiler have it

 protected:
  virtual int shown_rank(int rank) const { return rank; }  // how messages number a rank of the group
  bool for_pytorch_ = false;                               // c10d's interface throws c10d's errors

 private:
  template <typename Call>
  auto translated(std::chrono::milliseconds own_timeout, Call&& call);
  // make() returns the operation, or a vector of them.
  template <typename Make>
  c10::intrusive_ptr<c10d::Work> issue(Make&& make, bool async);
  template <typename Make>
  c10::intrusive_ptr<c10d::Work> issue_batch(Make&& make, bool async);

  std::atomic<uint64_t> called_{0};  // collectives, through c10d's interface
};

// The backend of a group. InvalidArgument if this rank is not a member.
Backend& backend_of(const Group& group);

}  // namespace muster::comm
