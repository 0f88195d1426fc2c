// Workers: whom remote calls go to, and the start and end of a World's RPC.
//
//   auto world = muster::init();
//   muster::rpc::init({.name = "trainer"});          // every rank of the World, each under a name of its own
//   … rpc::sync<&f>("ps", x) …                        // call.h
//   muster::rpc::shutdown();                          // waits until nobody calls any more
//
// A World that ends without shutdown() ends its RPC abruptly: the others' calls to this worker fail with PeerLost, and
// nobody is waited for. So does an exception that leaves main().
//
// Between processes of one host messages go through shared memory; between hosts over TCP, under TLS 1.3 with a key
// that the job's secret gives. Nobody else can call: see docs/security.md. (Over UCX, for who asks for it, others can.)
//
// Thread-safety: init() and shutdown() from one thread; everything else from any.
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

// A device of this worker's and the other worker's that belongs to it, each with its index.
struct MappedDevice {
  c10::Device here, there;
};
// No device twice on a side. The CPU may be mapped too; where it is not it belongs to the CPU.
using DeviceMap = std::vector<MappedDevice>;

struct Options {
  std::string name;                           // of this worker, unique in the job; empty: "worker<rank>"
  std::chrono::milliseconds timeout{60'000};  // of each call that does not bring its own; 0: none
  int max_threads = 16;                       // handlers that run at once; those that wait do not count
  // Between hosts: a worker that is silent for as long is lost. MUSTER_RPC_HEARTBEAT (milliseconds), else 2 s.
  std::chrono::milliseconds heartbeat = default_heartbeat();
  int max_calls = 4096;                   // that one worker has not answered, given up or not; who makes more waits
  size_t max_backlog = size_t{64} << 20;  // bytes under way to one worker; the same
  // Which ways messages go; the same on every worker. "auto": shared memory on one host and TCP between hosts, or what
  // MUSTER_RPC_TRANSPORT says. "shm": one host only. "tcp", "ucx": also on one host. "shm,ucx": UCX between hosts,
  // which neither asks for the job's secret nor encrypts: for trusted fabrics only.
  std::string transport = "auto";
  // For tensors that are not on the CPU, by the worker that is called, this one too if it calls itself: an argument on
  // `here` arrives on the worker's `there`; what the call gives back goes by the same map, from `there` to `here`.
  //   rpc::init({.device_maps = {{"ps", {{.here = {at::kCUDA, 0}, .there = {at::kCUDA, 1}}}}}});
  // A tensor on another device is InvalidArgument. The bytes go through the CPU's memory; see docs/rpc.md.
  std::map<std::string, DeviceMap> device_maps;
};

struct WorkerInfo {
  std::string name;
  int id = 0;    // the rank
  int host = 0;  // hosts are numbered in the order of their first ranks
};

// Starts RPC in the World that is current in this thread; every rank of it must. Returns when all are there and can be
// called. Errors: Timeout names who did not come (within the World's timeout); InvalidArgument, two workers of one
// name, or on every rank a device map of one of them for a worker or with a device that there is not, or with one
// twice; Mismatch, workers with other transports; Unauthorized, a worker on another host without the job's secret;
// Unavailable, no way to a worker, or no UCX here.
void init(const Options& options = {});

enum class Shutdown {
  kGraceful,  // waits until all workers have called shutdown() and their calls are over
  kAbrupt,    // waits for nobody: what is under way fails, here with Aborted and on the others with PeerLost
};
// Ends RPC in the current World. A graceful one that has not ended by the deadline, or finds that a worker died, still
// ends, abruptly, and then throws Timeout or PeerLost. Without init(): nothing to do.
void shutdown(Shutdown how = Shutdown::kGraceful,
              std::chrono::milliseconds timeout = std::chrono::milliseconds(300'000));

bool is_running();

// What these refer to stays, also after shutdown().
const WorkerInfo& worker_info();                       // this worker
const WorkerInfo& worker_info(std::string_view name);  // InvalidArgument names those that there are
const WorkerInfo& worker_info(int rank);
const std::vector<WorkerInfo>& all_workers();  // by rank
bool is_alive(int rank);

// For tests and for looking at a job.
struct Census {
  size_t owned_objects = 0;     // that somebody refers to by RRef
  size_t pending_calls = 0;     // from here
  size_t running_handlers = 0;  // queued, running, waiting
  size_t threads = 0;
};
Census census();

}  // namespace muster::rpc
