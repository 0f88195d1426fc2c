// Transport between hosts: TCP, under TLS 1.3 with a key that the job's secret gives (store/tls.h).
//
// Each worker leaves its address and a key of its own in the job's directory; of each pair the one of higher rank
// connects; both greet each other (hello.h); when all have come, the port is closed. Then there are frames (frame.h) in
// both directions until one side says good-bye or is lost (connection.h). docs/transport.md tells it in whole.
//
//   heartbeat   Who has nothing else to say says so, a quarter of the shorter of both sides' intervals after its last
//               word. Who is silent for the whole interval is lost.
//   threads     One, "muster-tcp": it reads, calls the receiver, and writes what did not fit at once. It must not be
//               kept: a receiver that blocks for the interval of the heartbeat is taken for dead by its peers.
//   fork        A child forked without exec must not use the transport, and may let it end: nothing is sent or closed
//               then. Its copies of the sockets keep no connection open that the parent closes, but do keep those of a
//               parent that is killed: the heartbeat finds that.
//   close()     Returns when all peers have what was sent, at the deadline at the latest. After it the receiver is not
//               called again, also not for the peers that were there.
//
// Addresses: without a secret, loopback only. With one, all interfaces; `host`, or else the addresses of this host's
// interfaces, which those who connect try one after another.
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
  std::vector<int> peers;  // whom to connect with; empty for all others below `size`
  int size = 1;
  std::vector<std::string> names;             // by rank, for messages
  std::string host;                           // the address of this host under which peers reach it; empty: found out
  std::optional<Secret> secret;               // without one: plain TCP, and only on the loopback interface
  std::chrono::milliseconds heartbeat{2000};  // a peer that is silent for as long is lost
  Limits limits;
  std::string prefix;  // of the keys in the directory
};

// Connects with every peer, or throws: Timeout names those who did not come; Unauthorized, one without the key;
// Mismatch, one of another version or size. The receiver is first called when all have come, which may be before this
// has returned; it may wait for that.
std::unique_ptr<Transport> make_tcp_transport(const TcpOptions& options, const Directory& directory, Receiver& receiver,
                                              Deadline deadline);

}  // namespace muster::transport
