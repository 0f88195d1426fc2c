// The interface of a backend, which executes a group's collectives and messages.
//
// Every backend derives from this class, which derives from c10d::Backend, so PyTorch's own code (and Python) can use
// it. Two functions take any operation as one struct: run() blocks and does not allocate, submit() returns immediately.
// c10d_bridge.cpp translates the many virtuals of c10d::Backend to Operations, so a backend implements only these two.
//
// A backend is a folder under backends/ with a create function in the table of backends.cpp. The factory, the contract
// tests and the benchmarks use that table. Three questions are answered in three places: whether a backend is compiled
// in (by the table), whether it works here (by its `why_not()`), and whether it reaches these peers (by its create
// function).
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

// One operation. The kind determines which fields are used:
//   all_reduce, broadcast, reduce, send, recv   tensor
//   all_gather, gather                          tensor = input; outputs: one per rank, or one for all
//   reduce_scatter, scatter                     tensor = output; inputs: one per rank, or one for all
//   all_to_all                                  inputs and outputs: one per rank each; or one tensor each, cut by the
//                                               splits (in rows, empty for equal ones)
// Lists of all_gather and reduce_scatter may have parts of unequal sizes; all ranks must pass the same sizes.
struct Operation {
  OpKind kind = OpKind::kBarrier;
  ReduceOp op = ReduceOp::SUM;
  int peer = 0;  // root, source or destination: a rank in the group; for recv also kAnySource
  int tag = 0;
  at::Tensor tensor;
  std::vector<at::Tensor> inputs, outputs;
  std::vector<int64_t> input_splits, output_splits;
  double factor = 1;                        // of PREMUL_SUM, unless factor_tensor is defined
  at::Tensor factor_tensor;                 // of PREMUL_SUM: one element, or of the tensor's shape
  std::chrono::milliseconds timeout{0};     // 0: the group's
  OpKind part_of = OpKind::kNothing;        // set by backends that make one operation of several
  std::optional<CallDescriptor> announced;  // if this is a step of another operation: that operation, which the ranks
                                            // compare instead of this one
  std::source_location site = {};           // where the user called
};

CallDescriptor descriptor_of(const Operation& operation);  // Operation::announced, if there is one

// A blocking message, or a blocking collective of one tensor or of one input and one output tensor, with equal parts
// and no extras. It says what an Operation says, without the cost of making one.
struct SmallCall {
  OpKind kind = OpKind::kBarrier;  // kNothing: the call is not a small one
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

  // Executes the call if it is small and plain. If it returns false, the caller must call run(), which also validates.
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
  // Memory that all ranks of the group share: BackendContext::board words, initially 0. Empty if the backend has none.
  virtual std::span<std::atomic<uint64_t>> board() { return {}; }
  // Whether no asynchronous operation is under way.
  virtual bool is_idle() const { return true; }
  // This rank ends its membership. If an error ends it, `cause` is not empty, and peers see it. Operations under way
  // fail.
  virtual void leave(const std::string& cause) = 0;
  // Makes the group fail with `cause` on all its ranks, unless it has failed already.
  virtual void fail(const Error& cause) = 0;
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
  // The World's, for backends in shared memory: heaps by rank in this group (may be empty), this rank's arena, the
  // watch.
  std::vector<std::shared_ptr<shm::Mapping>> heaps;
  std::shared_ptr<shm::Arena> arena;
  std::shared_ptr<shm::PeerWatch> watch;
  std::shared_ptr<shm::BlackBox> black_box;  // may be null
  std::vector<int> global_ranks;             // of the members, for the black box
  std::vector<Member> members;               // by rank in this group; empty: all on this host
  std::vector<int> shown_ranks;              // how messages and errors number the ranks; empty: unchanged
  std::string inner;                         // of hierarchical: the backend between hosts
  int local_threads = 1;                     // ranks that compete for this host's cores
  int cores = 1;                             // that these ranks may use together (base/cores.h)
  size_t board = 0;                          // words of Backend::board()
  // For a group of the hosts' leaders over a wire: where the group counts which host and rank come last.
  std::shared_ptr<HostArrivals> host_arrivals;
  // For PyTorch's ProcessGroup (process_group.h): the backend is called "muster" there, and c10d's interface and works
  // throw c10d's errors.
  bool for_pytorch = false;
  std::function<void(const Backend*)> on_leave;  // called once, when the membership has ended; may be empty
};

// Which faults of a FaultPlan a backend injects.
enum class Injects : uint8_t { kNothing, kAllButCorrupt, kEverything };

struct BackendEntry {
  std::string_view name;
  c10::intrusive_ptr<Backend> (*create)(const BackendContext&);
  std::string (*why_not)();     // empty: works here; else what is missing and how to get it
  bool maps_heaps = false;      // takes BackendContext::heaps
  bool needs_peers = true;      // false: a rank works alone, whatever the size of its world, and data does not move
  bool needs_launcher = false;  // works only in processes that its own launcher started (mpirun)
  Injects injects = Injects::kNothing;
};

// All backends that are compiled in.
const std::vector<BackendEntry>& backends();

// Finds a backend by name. "auto" is shm if all members are on one host, else hierarchical; "hierarchical:mpi" also
// names the backend between hosts. InvalidArgument for an unknown name; the error lists the known ones.
const BackendEntry& find_backend(const std::string& name, bool one_host);
// Finds a backend like find_backend() and creates it. Unavailable if it does not work here.
c10::intrusive_ptr<Backend> create_backend(const std::string& name, BackendContext context);

}  // namespace muster::comm
