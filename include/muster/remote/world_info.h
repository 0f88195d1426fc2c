// This worker's position in the job: TorchOpt's names for the ranks and names of World and rpc::worker_info().
//
//   torch::Device device(torch::kCUDA, muster::get_local_rank());
//   if (muster::get_rank() == 0) …                          // on_rank.h wraps functions in this condition
//   int ps = muster::get_worker_id("ps");
//
// The functions work in any thread that has a World: that of auto_init_rpc() or muster::init(), those of run_threads(),
// and threads of handlers of remote calls, which get the numbers of the worker that they run on.
//
// Errors: Aborted if the thread has no World; for a name, InvalidArgument (lists the known names) and Aborted (RPC is
// not running). Thread-safety: all functions; WorldInfo and WorkerId are values.
// Source: torchopt.distributed.world. Its barrier is muster::barrier() (muster/comm/collectives.h).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "muster/rpc/call.h"

namespace muster {

struct WorldInfo {
  int world_rank = 0, world_size = 1;
  int local_rank = 0, local_world_size = 1;  // among the workers of its host
  std::string worker_name;                   // its name for remote calls; "worker<rank>" while RPC is not running

  int rank() const { return world_rank; }
  bool is_world_leader() const { return world_rank == 0; }
  bool is_local_leader() const { return local_rank == 0; }
};

WorldInfo get_world_info();
int get_world_rank();
int get_rank();  // the same
int get_world_size();
int get_local_rank();
int get_local_world_size();
std::string get_worker_name();
bool is_world_leader();
bool is_local_leader();

// A worker by number or by name. A name is looked up when it is used, so a WorkerId can be made before RPC runs.
class WorkerId {
 public:
  WorkerId(int rank) : id_(rank) {}
  WorkerId(const char* name) : id_(std::string(name)) {}
  WorkerId(std::string_view name) : id_(std::string(name)) {}
  WorkerId(std::string name) : id_(std::move(name)) {}
  WorkerId(const rpc::WorkerInfo& worker) : id_(worker.id) {}

  rpc::To to(const rpc::CallOptions& options = {}) const;  // InvalidArgument if there is no such worker, or it is any
  // What any_worker() was given; null for a certain worker.
  const std::vector<WorkerId>* among() const {
    const auto* const any = std::get_if<Any>(&id_);
    return any ? any->get() : nullptr;
  }

 private:
  using Any = std::shared_ptr<const std::vector<WorkerId>>;
  friend WorkerId any_worker(std::vector<WorkerId> among);
  explicit WorkerId(Any any) : id_(std::move(any)) {}

  std::variant<int, std::string, Any> id_;
};

// For partitioners: whichever of these workers (empty: of all) has the fewest parts of this call to do. If a call has
// only one part, calls take the workers in turn.
WorkerId any_worker(std::vector<WorkerId> among = {});

int get_worker_id();  // of this worker
int get_worker_id(const WorkerId& worker);

}  // namespace muster
