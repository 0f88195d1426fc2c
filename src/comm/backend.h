// What a backend is: the plug that collectives go through.
//
// Every backend derives from c10d::Backend, so PyTorch's own code (and Python) can use it; and from this class, whose
// two functions take any operation as one struct: run() blocks and has no allocation on its path, submit() returns at
// once. The many virtuals of c10d::Backend are translated to Operations in one place (c10d_bridge.cpp), so that a
// backend implements two functions.
//
// A backend is a folder under backends/ with a create function in the table of backends.cpp; the table feeds the
// factory, the contract tests and the benchmarks. "Compiled in", "works here" and "reaches these peers" are three
// questions: is it in the table; its `why_not()`; its create function.
//
// Thread-safety: run(), submit() and stats() from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/descriptor.h"
#include "comm/members.h"
#include "comm/op_kind.h"
#include "muster/base/error.h"
#include "muster/comm/fault_plan.h"
#include "muster/comm/group.h"
#include "muster/store/store.h"

namespace muster::shm {
class Arena;
class BlackBox;
class Mapping;
class PeerWatch;
}  // namespace muster::shm

namespace muster::comm {

class Stragglers;
struct HostArrivals;

// One operation. Which fields count depends on the kind:
//   all_reduce, broadcast, reduce, send, recv   tensor
//   all_gather, gather                          tensor = input; outputs: one a rank, or one for all
//   reduce_scatter, scatter                     tensor = output; inputs: one a rank, or one for all
//   all_to_all                                  inputs and outputs: one a rank each; or one tensor each, cut by the
//                                               splits (in rows, empty for equal ones)
// Lists of all_gather and reduce_scatter may have parts of unequal sizes, the same list on all ranks.
struct Operation {
  OpKind kind = OpKind::kBarrier;
  ReduceOp op = ReduceOp::SUM;
  int peer = 0;  // root, source or destination: a rank in the group; for recv also kAnySource
  int tag = 0;
  at::Tensor tensor;
  std::vector<at::Tensor> inputs, outputs;
  std::vector<int64_t> input_splits, output_splits;
  double factor = 1;                        // of PREMUL_SUM; or
  at::Tensor factor_tensor;                 // of one element or of the tensor's shape
  std::chrono::milliseconds timeout{0};     // 0: the group's
  OpKind part_of = OpKind::kNothing;        // set by backends that make one operation of several
  std::optional<CallDescriptor> announced;  // what the ranks compare, where it is not the operation itself: the whole
                                            // of which this is a step
  std::source_location site = {};           // where the user called
};

CallDescriptor descriptor_of(const Operation& operation);  // Operation::announced, if there is one

// A blocking collective of one tensor, or of one in and one out, equal parts and no extras, or a message: what an
// Operation says, without the cost of making one.
struct SmallCall {
  OpKind kind = OpKind::kBarrier;  // kNothing: no small call after all
  ReduceOp op = ReduceOp::SUM;
  int peer = 0;
  const at::Tensor* tensor = nullptr;  // as Operation's; of an all_to_all, the output
  const at::Tensor* other = nullptr;   // the output of an all_gather, the input of a reduce_scatter or an all_to_all
  std::chrono::milliseconds timeout{0};
  const std::source_location& site;
  int tag = 0;
};

// Whether this thread is in a callback of an operation's future.
bool in_callback_of_future();

class Backend : public c10d::Backend {
 public:
  using c10d::Backend::Backend;

  // Does it, where it is small and plain; false: call run() instead, which also finds mistakes.
  virtual bool run_small(const SmallCall&) { return false; }

  virtual void run(const Operation& operation) = 0;
  virtual c10::intrusive_ptr<c10d::Work> submit(Operation operation) = 0;
  // Several collectives, one after another, as one piece of work; at least one.
  virtual c10::intrusive_ptr<c10d::Work> submit_batch(std::vector<Operation> operations) = 0;
  virtual CommStats stats() const = 0;
  virtual const std::string& group_name() const = 0;                // "world", "group 1"
  virtual const Stragglers* stragglers() const { return nullptr; }  // null: this backend cannot tell
  virtual std::string straggler_verdict(std::chrono::nanoseconds at_least) const;
  // At the end of a group: its rank 0 logs who was last by a second or more in all.
  void warn_of_straggler() const;
  // Memory that all ranks of the group share, BackendContext::board words, at first 0; where the backend has any.
  virtual std::span<std::atomic<uint64_t>> board() { return {}; }
  // Whether no asynchronous operation is under way.
  virtual bool is_idle() const { return true; }
  // This rank ends its membership; `cause` is not empty where it ends by an error, which peers then see. Operations
  // under way fail.
  virtual void leave(const std::string& cause) = 0;
  // Makes the group fail with `cause` on all its ranks, unless it has failed already.
  virtual void fail(const Error& cause) = 0;
  // For a backend that is made of several groups: takes a message with the tag of `receive`, which is from any source,
  // where one has come that no other receive wants; of those, from the first source in the order from, from + 1, ….
  // Null where none has come, and nothing is left pending; else as submit(). Throws the group's failure.
  // InvalidArgument where the backend has no such receives.
  struct Taken {
    c10::intrusive_ptr<c10d::Work> work;
    int source = kAnySource;
    bool all_gone = false;  // without work: none will come, because all other ranks have left
  };
  virtual Taken take_message(const Operation& receive, int from);
  // That of operations which have none of their own.
  virtual std::chrono::milliseconds timeout() const = 0;

  // c10d's interface, in terms of these. Where the caller says that it will wait (asyncOp = false), the operation runs
  // at once, on its thread.
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

 protected:
  bool for_pytorch_ = false;  // c10d's interface throws c10d's errors

 private:
  template <typename Call>
  auto translated(std::chrono::milliseconds own_timeout, Call&& call);
  // make() returns the operation, or a vector of them.
  template <typename Make>
  c10::intrusive_ptr<c10d::Work> issue(Make&& make, bool async);
  template <typename Make>
  c10::intrusive_ptr<c10d::Work> issue_batch(Make&& make, bool async);
};

// What a backend's create function is given.
struct BackendContext {
  std::string group_name = "world";
  std::string store_prefix;  // unique to the group
  int rank = 0, size = 1;
  std::shared_ptr<Store> store;
  std::chrono::milliseconds timeout{300'000};
  FaultPlan faults;
  // The World's, for backends in shared memory: heaps by rank in this group (may be empty), the own arena, the watch.
  std::vector<std::shared_ptr<shm::Mapping>> heaps;
  std::shared_ptr<shm::Arena> arena;
  std::shared_ptr<shm::PeerWatch> watch;
  std::shared_ptr<shm::BlackBox> black_box;  // may be null
  std::vector<int> global_ranks;             // of the members, for the black box
  std::vector<Member> members;               // by rank in this group; empty: all on this host
  std::vector<int> shown_ranks;              // what messages and errors call the ranks; empty: as they are
  std::string inner;                         // of hierarchical: the backend between hosts
  int local_threads = 1;                     // ranks that compete for this host's cores
  int cores = 1;                             // which they may use together (base/cores.h)
  size_t board = 0;                          // words of Backend::board()
  // Of a group of hosts' leaders over a wire: where it counts who comes last.
  std::shared_ptr<HostArrivals> host_arrivals;
  // For PyTorch's ProcessGroup (process_group.h): its name there is "muster", and what c10d's interface and works throw
  // are c10d's errors.
  bool for_pytorch = false;
  std::function<void(const Backend*)> on_leave;  // called once, when the membership has ended; may be empty
};

// Which faults of a FaultPlan a backend injects.
enum class Injects : uint8_t { kNothing, kAllButCorrupt, kEverything };

struct BackendEntry {
  std::string_view name;
  c10::intrusive_ptr<Backend> (*create)(const BackendContext&);
  std::string (*why_not)();     // empty: works here; else what is missing and what brings it
  bool maps_heaps = false;      // takes BackendContext::heaps
  bool needs_peers = true;      // false: a rank works alone, whatever the size of its world, and data does not move
  bool needs_launcher = false;  // works only in processes that its own launcher started (mpirun)
  Injects injects = Injects::kNothing;
};

// All backends that are compiled in.
const std::vector<BackendEntry>& backends();

// By name; "auto" is shm for members on one host and hierarchical for more; "hierarchical:mpi" says what is used
// between hosts. InvalidArgument for an unknown name (listing the known).
const BackendEntry& find_backend(const std::string& name, bool one_host);
// The same, ready. Unavailable for one that does not work here.
c10::intrusive_ptr<Backend> create_backend(const std::string& name, BackendContext context);

}  // namespace muster::comm
