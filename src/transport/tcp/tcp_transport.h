// Transport between hosts: TCP, under TLS 1.3 with a key that is derived from the job's secret (store/served/tls.h).
//
// Each worker leaves its address and its own key in the job's directory. Of each pair the worker of higher rank
// connects, and both greet each other (hello.h). When all have connected, the port is closed. Then frames (frame.h) go
// in both directions until one side says good-bye or is lost (connection.h). docs/transport.md describes all of it.
//
//   heartbeat   A side that has nothing to send sends a heartbeat, a quarter of the shorter of both sides' intervals
//               after its last frame. A side that is silent for the whole interval is lost.
//   threads     "muster-tcp" reads, calls the receiver, and writes what did not fit immediately. It should not be
//               blocked. While it is, "muster-heart" sends heartbeats (transport/heart.h), for a minute at most: then
//               the peers take the worker for dead.
//   fork        A child forked without exec must not use the transport, but may destroy it: nothing is sent or closed
//               then. Its copies of the sockets do not keep open a connection that the parent closes, but they do keep
//               open those of a parent that is killed: the heartbeat detects that.
//   close()     Returns when all peers have what was sent, at the deadline at the latest. Afterwards the receiver is
//               not called again, not even to report the loss of its peers.
//
// Addresses: without a secret, only loopback. With a secret, the transport listens on all interfaces; it announces
// `host`, or if that is empty the addresses of this host's interfaces, which the peers try one after another.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/base/deadline.h"
#include "muster/base/secret.h"
#include "transport/directory.h"
#include "transport/transport.h"

namespace muster::transport {

struct TcpOptions {
  int rank = 0;
  std::vector<int> peers;  // the workers to connect with; empty for all others below `size`
  int size = 1;
  std::vector<std::string> names;             // by rank, for messages
  std::string host;                           // the address at which peers reach this host; empty: its interfaces'
  std::optional<Secret> secret;               // without one: plain TCP, and only on the loopback interface
  std::chrono::milliseconds heartbeat{2000};  // a peer that is silent for this long is lost
  Limits limits;
  std::string prefix;  // of the keys in the directory
};

// Connects with every peer, or throws: TimeoutError names those that did not come; Unauthorized, a peer without the
// key; Mismatch, a peer of another version or size. The receiver is first called when all have come, which may be
// before this function has returned; the receiver may wait for that.
std::unique_ptr<Transport> make_tcp_transport(const TcpOptions& options, const Directory& directory, Receiver& receiver,
                                              Deadline deadline);

}  // namespace muster::transport
