// Transport over UCX, for fabrics that the kernel's TCP uses poorly: InfiniBand, RoCE and the like; also over UCX's own
// ways through TCP and shared memory. It is used only if it is chosen by name.
//
// There is no authentication and no encryption: anyone who can reach the fabric's addresses can send anything, and read
// everything. Use it only on trusted fabrics. What comes is checked nevertheless (packet.h, inflow.h): lengths before
// memory is allocated, and a key from the directory, which keeps out packets of other jobs but is not secret on the
// wire.
//
// Each worker leaves the address of its UCX worker in the job's directory, reads those of its peers, and says hello. A
// worker that has heard from all peers is connected. docs/transport.md describes all of it.
//
//   loss        Detected by UCX, if it notices; by pidfd for peers on this host, if `watch` is given; and by silence,
//               as in tcp: a peer that has sent nothing for the whole of `heartbeat` is lost. UCX's own keepalive takes
//               tens of seconds, and does not detect a process that is stopped.
//   threads     "muster-ucx" drives UCX and calls the receiver. It should not be blocked. While it is, "muster-heart"
//               sends heartbeats, as in tcp. UCX has its own thread besides.
//   fork        A child forked without exec must not use the transport, but may destroy it: nothing is sent or closed
//               then.
//   close()     Returns when all peers have delivered what was sent, at the deadline at the latest. Afterwards the
//               receiver is not called again.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/deadline.h"
#include "shm/peer_watch.h"
#include "transport/directory.h"
#include "transport/transport.h"
#include "transport/ucx/fabric.h"

namespace muster::transport {

struct UcxOptions {
  int rank = 0;
  std::vector<int> peers;  // the workers to connect with; empty for all others below `size`
  int size = 1;
  std::vector<std::string> names;             // by rank, for messages
  std::vector<int> local;                     // the peers that are processes of this host
  std::shared_ptr<shm::PeerWatch> watch;      // reports when one of `local` dies; may be null
  std::chrono::milliseconds heartbeat{2000};  // a peer that is silent for this long is lost
  std::chrono::nanoseconds spin{0};           // how long to spin before a sleep
  Limits limits;
  std::string prefix;      // of the keys in the directory
  ucx::Settings settings;  // of UCX, beside its environment: {"TLS", "rc,self"}
  std::function<std::unique_ptr<ucx::Fabric>(ucx::FabricEvents&)> fabric;  // in UCX's place, for tests
};

// Connects with every peer, or throws: Unavailable if UCX is missing or finds no way to a peer; TimeoutError names
// those that did not come; Mismatch, a peer of another version or size. The receiver is first called when all have
// come, which may be before this function has returned; the receiver may wait for that.
std::unique_ptr<Transport> make_ucx_transport(const UcxOptions& options, const Directory& directory, Receiver& receiver,
                                              Deadline deadline);

}  // namespace muster::transport
