// A store that a server in another process, or on another host, holds: all of a client but how it gets its connections.
//
// A call takes an idle connection, or makes one where all are in use, sends its request and waits for the reply with
// poll(2); so a thread that waits blocks no other, and the client needs no thread. A connection whose call failed is
// closed: nobody knows what it would say next.
//
// A server that is gone stays gone: its table was in its memory. So where nobody serves any more, a call fails with
// Unavailable, and those after it do too.
//
// Between hosts a connection may be cut although the server lives. There, for Dialer::patience(), a call makes another
// connection and is sent again; the server does it once (answers.h). One that was refused, by a host that is there,
// ends that at once: nobody serves there.
//
// Thread-safety: as Store. A Dialer's methods may run in several threads at once.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "muster/base/deadline.h"
#include "muster/store/store.h"
#include "store/connection.h"

namespace muster::store {

// Makes the connections to one server.
class Dialer {
 public:
  virtual ~Dialer() = default;

  struct Dialed {
    std::unique_ptr<Connection> connection;  // null where there is none
    bool busy = false;                       // then: somebody serves there, and cannot take one more just now
    std::string reason;                      // then: why, or nothing
    bool cut = false;                        // then: nobody knows who is there
  };
  // Tries once. Throws what trying again would not change (Unauthorized), and Timeout.
  virtual Dialed dial(Deadline deadline) = 0;

  virtual std::string address() const = 0;
  // How long to try to reach a server again to which a connection was cut; 0: who cannot be reached has gone.
  virtual std::chrono::milliseconds patience() const { return std::chrono::milliseconds(0); }
  // What to do where nobody serves there.
  virtual std::string advice() const { return "Is the launcher (muster run) that serves it still alive?"; }
};

// Dials until `deadline`, then Unavailable.
std::shared_ptr<Store> make_served_store(std::unique_ptr<Dialer> dialer, Deadline deadline);

// Whether `fd` is ready for `events` before the deadline.
bool await(int fd, short events, Deadline deadline);

}  // namespace muster::store
