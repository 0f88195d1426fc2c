// Transport over UCX, for fabrics of which the kernel's TCP uses little: InfiniBand, RoCE and the like; also over UCX's
// own ways through TCP and shared memory. Chosen by name, never by itself.
//
// There is no authentication and no encryption: whoever reaches the fabric's addresses can send what it likes, and read
// along. For trusted fabrics only. What comes is checked nevertheless (packet.h, inflow.h): lengths before memory is
// taken, and a key from the directory, which keeps out what is left of other jobs but is no secret on the wire.
//
// Each worker leaves the address of its UCX worker in the job's directory, reads those of its peers, and says hello;
// who has heard all is connected. docs/transport.md tells it in whole.
//
//   loss        By UCX, where it notices; by pidfd for peers on this host, where `watch` is given; and by silence, as
//   in
//               tcp: who has said nothing for the whole of `heartbeat` is lost. UCX's own keepalive takes tens of
//               seconds, and finds no process that is stopped.
//   threads     One, "muster-ucx": it drives UCX and calls the receiver. It must not be kept for the time of a
//               heartbeat. UCX has a thread of its own besides.
//   fork        A child forked without exec must not use the transport, and may let it end: nothing is sent or closed
//               then.
//   close()     Returns when all peers have delivered what was sent, at the deadline at the latest. After it the
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
  std::vector<int> peers;  // whom to connect with; empty for all others below `size`
  int size = 1;
  std::vector<std::string> names;             // by rank, for messages
  std::vector<int> local;                     // those of the peers that are processes of this host,
  std::shared_ptr<shm::PeerWatch> watch;      // which says when they die; may be null
  std::chrono::milliseconds heartbeat{2000};  // a peer that is silent for as long is lost
  std::chrono::nanoseconds spin{0};           // how long to look again and again before a sleep
  Limits limits;
  std::string prefix;      // of the keys in the directory
  ucx::Settings settings;  // of UCX, beside its environment: {"TLS", "rc,self"}
  std::function<std::unique_ptr<ucx::Fabric>(ucx::FabricEvents&)> fabric;  // in UCX's place, for tests
};

// Connects with every peer, or throws: Unavailable where UCX is not here or finds no way to a peer; Timeout names those
// who did not come; Mismatch, one of another version or size. The receiver is first called when all have come, which
// may be before this has returned; it may wait for that.
std::unique_ptr<Transport> make_ucx_transport(const UcxOptions& options, const Directory& directory, Receiver& receiver,
                                              Deadline deadline);

}  // namespace muster::transport
