// World: one rank's membership in a job. It owns the store, the default group, the heap and the watch over the peers.
//
//   auto world = muster::init();   // under muster run, torchrun, mpirun, srun, or alone (a world of one rank)
//
// or, for N ranks that are threads of this process (debuggers, sanitizers, tests):
//
//   muster::run_threads(4, [](muster::World& world) { … });
//
// No job state belongs to the process: free functions such as all_reduce() use the World that is current in the calling
// thread. init() and run_threads() make theirs current; other threads use World::Scope.
//
// Destroying a World says good-bye to the peers: a peer that still waits for this rank gets PeerLost ("left"), and
// operations of this rank that are under way fail with Aborted. The destructor waits for no other rank and does not
// throw.
//
// Thread-safety: any thread may call const methods and abort(); construct, move and destroy a World in one thread only.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "muster/comm/fault_plan.h"
#include "muster/comm/group.h"
#include "muster/comm/heap.h"
#include "muster/store/store.h"

namespace muster {
namespace comm {
class WorldStarter;
}

// The position of a rank in the job; local_… is its position among the ranks of its host.
struct Placement {
  int rank = 0, world_size = 1;
  int local_rank = 0, local_world_size = 1;
  int node_rank = 0;
};

struct WorldOptions {
  // "shm"           ranks of one host, in its shared memory
  // "gloo"          libtorch's Gloo: ranks anywhere that TCP reaches
  // "mpi"           ranks that mpirun or srun started, over MPI
  // "nccl"          libtorch's NCCL for CUDA tensors, "auto" for CPU tensors; "nccl:gloo": gloo for CPU tensors
  // "hierarchical"  shm inside each host, gloo between the first ranks of the hosts; "hierarchical:mpi": mpi for gloo
  // "fake"          this rank alone simulates a world of any size, and no data moves: for dry runs
  // "auto"          shm on one host, hierarchical over several; the log says which
  std::string backend = "auto";
  std::chrono::milliseconds timeout{300'000};  // of the start, and of each operation without a timeout of its own
  size_t heap_capacity = 0;                    // bytes; 0: the host's memory
  FaultPlan faults;                            // for tests; MUSTER_FAULTS adds to it
};

class [[nodiscard("a World that nobody keeps leaves the job at the end of the statement")]] World {
 public:
  // Joins a world at the given placement; all ranks share `store`. Blocks until all ranks have come. Errors:
  // InvalidArgument (rank outside the world), TimeoutError (names the missing ranks), Unavailable (no common shared
  // memory: ranks are on several hosts).
  World(Placement placement, std::shared_ptr<Store> store, const WorldOptions& options = {});
  World(World &&) noexcept;
  World& operator=(World&&) noexcept;
  ~World();

  int rank() const;
  int world_size() const;
  int local_rank() const;
  int local_world_size() const;
  int node_rank() const;

  const Group& group() const;  // every rank
  // Makes a group of some ranks (global ranks, in the order that they have in the group). Every rank of the World must
  // call it, with the same arguments and in the same order of calls; ranks outside the group get a handle with
  // is_member() == false. When its last handle of the group is destroyed, this rank leaves the group; if operations are
  // still under way, with the next new_group() after their end, or with the World.
  Group new_group(const std::vector<int>& ranks, const GroupOptions& options = {});

  // Breaks all groups of this World: their operations, under way or to come, throw Aborted with `why`, on all ranks
  // that notice. For a caller that learns before the groups do that peers are gone.
  void abort(const std::string& why) noexcept;

  Store& store() const;
  std::shared_ptr<Store> shared_store() const;
  Heap& heap() const;
  std::shared_ptr<Heap> shared_heap() const;

  // The World of the calling thread. current() throws Aborted if there is none.
  static World& current();
  static World* current_or_null();

  struct State;
  struct Parts;  // src/comm/world/world_parts.h: for the layers that build on a World
  const Parts& parts() const;

  // Makes a World current in this thread for as long as the Scope lives, e.g. in a thread that the program started.
  class Scope {
   public:
    explicit Scope(World& world);
    explicit Scope(const Parts& world);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();

   private:
    void* previous_;
  };

  // A component that a layer above keeps with a World (the RPC agent), at most one of each type. The World destroys its
  // components before its groups, the last attached first. find() returns null if there is none of that type.
  template <typename T>
  void attach(std::shared_ptr<T> component) {
    attach(typeid(T), std::move(component));
  }
  template <typename T>
  std::shared_ptr<T> find() const {
    return std::static_pointer_cast<T>(find(typeid(T)));
  }
  template <typename T>
  void detach() {
    detach(typeid(T));
  }

 private:
  World(Placement placement, std::shared_ptr<Store> store, const WorldOptions& options, bool ranks_are_threads,
        const std::string& host);
  void attach(const std::type_info& type, std::shared_ptr<void> component);
  std::shared_ptr<void> find(const std::type_info& type) const;
  void detach(const std::type_info& type);

  friend class comm::WorldStarter;  // src/comm/world/world_starter.h
  std::unique_ptr<State> state_;
};

// Joins the job that the environment describes, and makes the World current in this thread. It looks, in this order,
// for:
//   MUSTER_STORE with RANK, WORLD_SIZE …     muster run, spawn()
//   MASTER_ADDR, MASTER_PORT, RANK, …        torchrun and anything else that speaks env://
//   …, JOB_COMPLETION_INDEX for RANK         a Kubernetes Indexed Job with a rank in each pod
//   OMPI_COMM_WORLD_RANK, …                  mpirun (Open MPI); PMI_RANK, … (MPICH)
//   SLURM_PROCID, SLURM_NTASKS, …            srun
//   nothing of these                         a world of one
// Errors: InvalidArgument names the variable that is wrong or missing; Unavailable if no process serves the store.
World init(const WorldOptions& options = {});

// Runs fn in n threads, each with a World of its own, and joins them. If some throw, rethrows the first cause: an
// exception that is not merely the consequence (PeerLost, Aborted) of another rank's end. Nested calls work.
void run_threads(int n, const std::function<void(World&)>& fn, const WorldOptions& options = {});

}  // namespace muster
