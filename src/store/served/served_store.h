// A store that a server in another process, or on another host, holds: the client, except how it makes connections.
//
// A call takes an idle connection, or makes one if all are in use, sends its request and waits for the reply with
// poll(2). So a thread that waits does not block others, and the client needs no thread. A connection whose call failed
// is closed, because its next bytes could belong to the failed call.
//
// A server that has gone does not come back, because its table was in its memory. So if nobody serves any more, this
// call and all later ones fail with Unavailable.
//
// Between hosts a connection may be cut although the server lives. Then, for Dialer::patience(), a call makes another
// connection and is sent again; the server executes it once (answers.h). If the host refuses the connection, nobody
// serves there, and the call fails immediately.
//
// Thread-safety: as Store. A Dialer's methods may run in several threads concurrently.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "muster/base/deadline.h"
#include "muster/store/store.h"
#include "store/served/client_stream.h"

namespace muster::store {

// Makes the connections to one server.
class Dialer {
 public:
  virtual ~Dialer() = default;

  struct Dialed {
    std::unique_ptr<ClientStream> connection;  // null if there is none
    bool busy = false;                         // then: a server is there, but cannot take another connection now
    std::string reason;                        // then: why; may be empty
    bool cut = false;                          // then: it is unknown whether the server lives
  };
  // Tries once. Throws errors that another attempt would not change (Unauthorized), and TimeoutError.
  virtual Dialed dial(Deadline deadline) = 0;

  virtual std::string address() const = 0;
  // How long to try to reach a server again after its connection was cut; 0: a server that cannot be reached has gone.
  virtual std::chrono::milliseconds patience() const { return std::chrono::milliseconds(0); }
  // What to do if nobody serves there.
  virtual std::string advice() const { return "Is the launcher (muster run) that serves it still alive?"; }
};

// Dials until `deadline`, then Unavailable.
std::shared_ptr<Store> make_served_store(std::unique_ptr<Dialer> dialer, Deadline deadline);

}  // namespace muster::store
