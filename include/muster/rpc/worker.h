// Workers: the targets of remote calls, and the start and end of a World's RPC.
//
//   auto world = muster::init();
//   muster::rpc::init({.name = "trainer"});           // every rank of the World calls it, each with its own name
//   … rpc::sync<&f>("ps", x) …                        // call.h
//   muster::rpc::shutdown();                          // waits until no worker makes calls any more
//
// A World that ends without shutdown() ends its RPC abruptly: other workers' calls to this worker fail with PeerLost,
// and this worker waits for no other. The same happens after an exception that leaves main().
//
// Between processes of one host messages go through shared memory; between hosts over TCP, under TLS 1.3 with a key
// that is derived from the job's secret. A process outside the job cannot call: see docs/security.md. (Over UCX, which
// is used only on request, it can.)
//
// Thread-safety: call init() and shutdown() from one thread; any thread may call everything else.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "muster/comm/world.h"

namespace muster::rpc {

std::chrono::milliseconds default_heartbeat();

// A device of this worker and its counterpart on the other worker, each with its index.
struct MappedDevice {
  c10::Device here, there;
};
// A device may not occur twice on one side. The CPU may be mapped too; by default it is mapped to the CPU.
using DeviceMap = std::vector<MappedDevice>;

struct Options {
  std::string name;                           // of this worker, unique in the job; empty: "worker<rank>"
  std::chrono::milliseconds timeout{60'000};  // of each call without a timeout of its own; 0: none
  // Handlers that run concurrently. Those that wait for Muster (a Future, an RRef) do not count; those that wait for
  // anything else (a mutex, a condition variable, a store, a file) do.
  int max_threads = 16;
  // Between hosts: a worker that is silent for this long is lost. MUSTER_RPC_HEARTBEAT (milliseconds), else 2 s.
  std::chrono::milliseconds heartbeat = default_heartbeat();
  // Limits to what one worker has in memory for this one. Further calls block, for their timeout at most.
  int max_calls = 4096;                     // that it has not answered, also cancelled ones
  size_t max_call_bytes = size_t{1} << 30;  // of messages of these calls that have 64 KiB or more
  size_t max_backlog = size_t{64} << 20;    // bytes under way to it
  // How messages are sent; the same on every worker. "auto": shared memory on one host and TCP between hosts, or the
  // value of MUSTER_RPC_TRANSPORT. "shm": one host only. "tcp", "ucx": also on one host. "shm,ucx": UCX between hosts,
  // which neither checks the job's secret nor encrypts: for trusted fabrics only.
  std::string transport = "auto";
  // For tensors that are not on the CPU, by the name of the called worker (also this one, if it calls itself): an
  // argument on `here` arrives on the worker's `there`; a result goes by the same map, from `there` to `here`.
  //   rpc::init({.device_maps = {{"ps", {{.here = {at::kCUDA, 0}, .there = {at::kCUDA, 1}}}}}});
  // A tensor on another device throws InvalidArgument. The bytes go through the CPU's memory; see docs/rpc.md.
  std::map<std::string, DeviceMap> device_maps;
};

struct WorkerInfo {
  std::string name;
  int id = 0;    // the rank
  int host = 0;  // hosts are numbered in the order of their first ranks
};

// Starts RPC in the World that is current in this thread; every rank of the World must call it. Returns when all
// workers have started and can be called. Errors: TimeoutError names the ranks that did not come within the World's
// timeout; InvalidArgument: two workers have the same name, or (thrown on every rank) a device map names a worker or a
// device that does not exist, or a device twice; Mismatch: workers have different transports; Unauthorized: a worker on
// another host does not have the job's secret; Unavailable: no route to a worker, or no UCX here.
void init(const Options& options = {});

enum class Shutdown {
  kGraceful,  // waits until all workers have called shutdown() and their calls are over
  kAbrupt,    // waits for no worker: calls under way fail, here with Aborted and on other workers with PeerLost
};
// Ends RPC in the current World. Before it returns, handlers that run on this worker end; nothing else can end a
// thread. So a handler that may run for long must look at this_call().cancelled(), which is true from now on; waits of
// Muster in a handler end by themselves. A warning names handlers that do not end. A worker that only serves waits here
// as long as others train, so a graceful shutdown has no time limit unless `timeout` gives one (0: none). If it has not
// ended by then, or a worker died, RPC ends abruptly, and shutdown() then throws TimeoutError or PeerLost. Without
// init() it does nothing.
void shutdown(Shutdown how = Shutdown::kGraceful, std::chrono::milliseconds timeout = std::chrono::milliseconds(0));

bool is_running();

// The references stay valid, also after shutdown().
const WorkerInfo& worker_info();                       // this worker
const WorkerInfo& worker_info(std::string_view name);  // InvalidArgument lists the known names
const WorkerInfo& worker_info(int rank);
const std::vector<WorkerInfo>& all_workers();  // by rank
bool is_alive(int rank);

// Numbers for tests and for inspecting a job.
struct Census {
  size_t owned_objects = 0;     // objects of this worker that an RRef refers to
  size_t pending_calls = 0;     // calls from this worker
  size_t running_handlers = 0;  // queued, running, waiting
  size_t threads = 0;
};
Census census();

}  // namespace muster::rpc
