// Transport: messages between the workers of a job, one to one, in order.
//
// A message is a body (small: what a codec wrote) and pieces (large: the bytes of tensors). Bodies are copied; pieces
// travel as cheaply as the way allows. Between processes of one host, a piece that nobody else holds changes its owner
// without a copy, and other pieces are copied once. Between hosts, a piece that nobody else holds is written from where
// it lies, and of other pieces the part that the way does not take immediately is copied. What arrives is what the
// message held at send(), even if its memory is written to later.
//
//   worker                                   its transport                               the peer's
//   send(peer, message) ─ never blocks ────> takes it all, or queues what the way ───> Receiver::on_message(peer, …)
//                                            does not take yet: backlog(peer)          in the order of send()
//
// What every transport promises:
//   order       messages of one worker to one other arrive in the order of send(), each once, whole, or not at all; if
//               not at all, then none after it either, and both sides get on_lost().
//   loss        on_lost(peer, cause) comes once, after the last message of that peer: because its process died
//               (reported immediately on one host; by heartbeat at the latest between hosts), it left (close()), or the
//               way broke. A transport never reconnects by itself: what was under way could be lost, or come twice.
//   push-back   send() never blocks, so two workers that send to each other never deadlock. A sender of much data looks
//               at backlog() and waits (wait_below()). A receiver that does not read delays only those that send to it.
//   bounds      every length that comes from a peer is checked against Limits before memory is touched or allocated for
//               it. A peer that breaks the limits is lost, with a cause that says so.
//
// A transport either has its own threads (tcp), or its owner drives it through poll() and sleep() (shm), so that the
// thread that waits for an answer can fetch it itself.
//
// Errors: send() throws PeerLost for a peer that is lost, InvalidArgument for a message above the limits.
// Thread-safety: all methods from any thread, except poll() and sleep(), which only one thread at a time may call.
// Receiver's methods are called from that thread or the transport's own; two calls for one peer never overlap.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/deadline.h"

namespace muster::transport {

// The bytes of a tensor, beside the body of a message.
struct Piece {
  std::byte* data = nullptr;
  size_t bytes = 0;
  // Outgoing: keeps `data` alive until it is read. Incoming: the holder may read and write the bytes, which nobody else
  // uses; if it is null, they are valid only while on_message() runs.
  std::shared_ptr<void> owner;
  // Outgoing: nobody else will read or write these bytes again, so their ownership may pass on without a copy.
  bool unique = false;
};

struct Message {
  std::string body;
  std::vector<Piece> pieces;
  // The message need not wake a sleeping receiver immediately: it may wait a millisecond for the receiver's next look.
  // Allowed only inside Receiver's methods, on the thread that will call poll(), sleep() or announce_waiting() next.
  bool can_wait = false;

  size_t bytes() const {
    size_t sum = body.size();
    for (const Piece& piece : pieces) sum += piece.bytes;
    return sum;
  }
};

struct Limits {
  size_t body = size_t{1} << 30;
  size_t pieces = 65'536;           // in one message
  size_t bytes = size_t{64} << 30;  // body and pieces of one message
};

class Receiver {
 public:
  // `body` is valid during the call; pieces may be moved from. Must not block, and must not throw: the receiver itself
  // deals with a message that makes no sense.
  virtual void on_message(int peer, std::string_view body, std::vector<Piece>& pieces) = 0;
  // Called once, after the peer's last message. `cause` can be printed: "worker1 (pid 7) died: …".
  virtual void on_lost(int peer, const std::string& cause) = 0;

 protected:
  ~Receiver() = default;
};

class Transport {
 public:
  virtual ~Transport() = default;  // closes and joins the threads; the receiver is not called afterwards

  virtual std::string_view name() const = 0;  // "shm", "tcp"

  // Takes the message; see above. Also allowed inside the receiver's methods.
  virtual void send(int peer, Message message) = 0;
  // Bytes that send() has taken and the way has not.
  virtual size_t backlog(int peer) const = 0;
  // Returns when backlog(peer) is at most `bytes`; throws PeerLost if the peer is lost, and TimeoutError. Must not be
  // called from the receiver's methods. A transport that is driven by poll() must be polled meanwhile: by another
  // thread, or by this one between short waits.
  virtual void wait_below(int peer, size_t bytes, Deadline deadline) = 0;

  // For a transport that is driven by its owner; others have nothing to do here.
  virtual bool poll() { return false; }  // delivers what has come, bounded; returns whether there was anything
  virtual void sleep(std::chrono::nanoseconds) {}  // until poll() would find something, wake(), or the time is over
  virtual void wake() {}                           // from any thread

  // Says good-bye to all peers: they get on_lost("… left"), after everything that was sent before and could still be
  // delivered within the deadline. Later calls of send() throw PeerLost. May be called again.
  virtual void close(Deadline flush) = 0;
};

}  // namespace muster::transport
