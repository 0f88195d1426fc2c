#include "comm/world/job_environment.h"

#include <unistd.h>

#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <sstream>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/env.h"
#include "base/process.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/store/c10d_store.h"

namespace muster::comm {
namespace {

// Ranks and sizes are ints. A number that does not fit must not be truncated.
int narrow(const char* name, int64_t value) {
  if (value < 0 || value > std::numeric_limits<int>::max())
    throw InvalidArgument(
        text("the environment variable ", name, ": expected a rank or a number of ranks, got ", value),
        text("Set ", name, " to a number from 0"));
  return static_cast<int>(value);
}
int env_or(const char* name, int otherwise) { return narrow(name, env_int(name).value_or(otherwise)); }
int require_int(const char* name) { return narrow(name, require_env_int(name)); }

// A number that launchers keep in different variables: the value of the first one that is set.
int first_of(std::initializer_list<const char*> names, int otherwise) {
  for (const char* name : names)
    if (const auto value = env_int(name)) return narrow(name, *value);
  return otherwise;
}

// The only variable that a Kubernetes Indexed Job sets in its pods.
constexpr const char* kPodIndex = "JOB_COMPLETION_INDEX";

// The variables of torchrun, which muster run sets as well.
Placement torchrun_placement() {
  Placement p;
  p.world_size = require_int("WORLD_SIZE");
  if (!env_string("RANK") && env_string(kPodIndex)) {  // one pod per rank
    p.rank = require_int(kPodIndex);
    p.local_rank = 0;
    p.local_world_size = 1;
    p.node_rank = p.rank;
    return p;
  }
  p.rank = require_int("RANK");
  p.local_rank = env_or("LOCAL_RANK", p.rank);
  p.local_world_size = env_or("LOCAL_WORLD_SIZE", p.world_size);
  p.node_rank = first_of({"GROUP_RANK", "NODE_RANK"}, 0);
  return p;
}

// A store that this process serves for its job lives as long as the process: when this rank's first World has ended,
// other ranks may still need the store or connect again. (docs/architecture.md lists all state of the process.)
std::shared_ptr<Store> served_by_this_process(const std::string& name,
                                              const std::function<std::shared_ptr<Store>()>& serve) {
  struct Served {
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<Store>> stores;
  };
  static auto* const served = std::make_unique<Served>().release();  // leaked: ends with the process
  const std::lock_guard lock(served->mutex);
  auto& store = served->stores[name];
  if (!store) store = serve();
  return store;
}

// torchrun's agent serves the store, unless TORCHELASTIC_USE_AGENT_STORE says otherwise; without torchrun, rank 0 does.
std::shared_ptr<Store> tcp_store(const Placement& placement, Deadline deadline) {
  const auto address = env_string("MASTER_ADDR"), agent = env_string("TORCHELASTIC_USE_AGENT_STORE");
  const auto port = require_env_int("MASTER_PORT");
  if (port < 1 || port > 65535)
    throw InvalidArgument(text("MASTER_PORT: expected a port, got ", port), "Use 1 to 65535");
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = placement.rank == 0 && agent != "True";
  options.numWorkers = placement.world_size;
  options.waitWorkers = false;
  options.timeout = std::chrono::milliseconds(deadline.poll_ms());
  const auto open = [&] {
    auto store = c10::make_intrusive<c10d::TCPStore>(*address, options);
    // Like torchrun's workers: a restart must not see the keys of the previous attempt.
    const auto attempt = env_or("TORCHELASTIC_RESTART_COUNT", 0);
    return from_c10d(c10::make_intrusive<c10d::PrefixStore>(text("muster/attempt_", attempt), store));
  };
  try {
    return options.isServer ? served_by_this_process(text("tcp/", port), open) : open();
  } catch (const c10::Error& error) {
    if (options.isServer)
      throw Unavailable(
          text("rank 0 cannot serve the store at port ", port, " (MASTER_PORT): ", error.what_without_backtrace()),
          "Set MASTER_PORT to a free port, on all ranks");
    throw Unavailable(text("nobody serves the store at ", *address, ":", port,
                           " (MASTER_ADDR, MASTER_PORT): ", error.what_without_backtrace()),
                      "Look whether rank 0 or torchrun runs, and whether the address is right");
  }
}

// For launchers without their own store: the ranks of one host meet at a socket whose name is derived from the job's.
std::shared_ptr<Store> host_store(const Placement& p, const std::string& job_name, Deadline deadline) {
  if (p.local_world_size != p.world_size)
    throw InvalidArgument(
        text("the job spans several hosts (", p.local_world_size, " of ", p.world_size, " ranks are here)"),
        "Set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, on all ranks");
  const std::string name = text("@muster-", ::geteuid(), "-", std::hex, std::hash<std::string>{}(job_name));
  if (p.rank != 0) return connect_store("unix:" + name, deadline);
  return served_by_this_process(name, [&] {
    struct Held {
      std::unique_ptr<StoreServer> server;
      std::shared_ptr<Store> store;
    };
    auto server = serve_store(name);
    auto store = server->local();
    const auto held = std::make_shared<Held>(Held{std::move(server), std::move(store)});
    return std::shared_ptr<Store>(held, held->store.get());
  });
}

std::shared_ptr<Store> tcp_or_host_store(const JoinedJob& job, const std::string& job_name, Deadline deadline) {
  return env_string("MASTER_ADDR") ? tcp_store(job.placement, deadline) : host_store(job.placement, job_name, deadline);
}

std::string parent_process() { return text(::getppid(), "/", start_time_of(::getppid())); }

void check(const Placement& p, const char* rank, const char* world_size) {
  if (p.world_size < 1)
    throw InvalidArgument(text("the world size: expected 1 or more, got ", p.world_size),
                          text("Set ", world_size, " to 1 or more"));
  if (p.rank < 0 || p.rank >= p.world_size)
    throw InvalidArgument(
        text("rank: expected 0 to ", p.world_size - 1, " in a world of ", p.world_size, ", got ", p.rank),
        text("Set ", rank, " to 0 … ", p.world_size - 1));
}

}  // namespace

JoinedJob join_job(Deadline deadline) {
  JoinedJob job;
  Placement& p = job.placement;
  if (env_string("MUSTER_STORE")) {
    job.started_by = "muster run";
    p = torchrun_placement();
    check(p, "RANK", "WORLD_SIZE");
    job.store = connect_job_store(deadline);
  } else if (env_string("MASTER_ADDR") && (env_string("RANK") || env_string(kPodIndex))) {
    const bool pods = !env_string("RANK");
    job.started_by = pods ? "an Indexed Job" : "env://";
    p = torchrun_placement();
    check(p, pods ? kPodIndex : "RANK", "WORLD_SIZE");
    job.store = tcp_store(p, deadline);
  } else if (env_string("OMPI_COMM_WORLD_RANK")) {
    job.started_by = "mpirun";
    p.rank = require_int("OMPI_COMM_WORLD_RANK");
    p.world_size = require_int("OMPI_COMM_WORLD_SIZE");
    p.local_rank = env_or("OMPI_COMM_WORLD_LOCAL_RANK", p.rank);
    p.local_world_size = env_or("OMPI_COMM_WORLD_LOCAL_SIZE", p.world_size);
    check(p, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
    job.store = tcp_or_host_store(
        job,
        "mpi/" + env_string("PMIX_NAMESPACE").value_or(parent_process()) + env_string("PMIX_SERVER_URI").value_or(""),
        deadline);
  } else if (env_string("PMI_RANK")) {
    job.started_by = "mpirun";
    p.rank = require_int("PMI_RANK");
    p.world_size = require_int("PMI_SIZE");
    p.local_rank = env_or("MPI_LOCALRANKID", p.rank);
    p.local_world_size = env_or("MPI_LOCALNRANKS", p.world_size);
    check(p, "PMI_RANK", "PMI_SIZE");
    job.store = tcp_or_host_store(job, "pmi/" + parent_process(), deadline);
  } else if (env_string("SLURM_PROCID") && env_string("SLURM_STEP_ID") && env_string("SLURM_STEP_NUM_TASKS")) {
    // srun sets SLURM_STEP_…. Inside a batch script without srun there is only one process.
    job.started_by = "srun";
    p.rank = require_int("SLURM_PROCID");
    p.world_size = require_int("SLURM_STEP_NUM_TASKS");
    p.local_rank = env_or("SLURM_LOCALID", p.rank);
    p.node_rank = env_or("SLURM_NODEID", 0);
    const int nodes = first_of({"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}, 1);
    p.local_world_size =
        nodes == 1 ? p.world_size : first_of({"SLURM_NTASKS_PER_NODE"}, (p.world_size + nodes - 1) / nodes);
    check(p, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS");
    job.store = tcp_or_host_store(
        job, text("slurm/", env_string("SLURM_JOB_ID").value_or(""), "/", *env_string("SLURM_STEP_ID")), deadline);
  } else {
    job.store = make_memory_store();
  }
  return job;
}

}  // namespace muster::comm
