// Transport: messages between the workers of a job, one to one, in order.
//
// A message is a body (small: what a codec wrote) and pieces (large: the bytes of tensors). Bodies are copied, pieces
// travel as cheaply as the way allows: between processes of one host a piece that nobody else holds changes hands
// without a copy, other pieces are copied once; between hosts the former are written from where they lie, and of the
// others what the way does not take at once is copied. What arrives is as it was at send(), whoever writes to it later.
//
//   worker                                   its transport                               the peer's
//   send(peer, message) ─ never blocks ────> takes it all, or queues what the way ───> Receiver::on_message(peer, …)
//                                            does not take yet: backlog(peer)          in the order of send()
//
// What every transport promises:
//   order       messages of one worker to one other arrive in the order of send(), each once, whole, or not at all; if
//               not at all, then none after it either, and both sides get on_lost().
//   loss        on_lost(peer, cause) comes once, after the last message of that peer: because its process died (said at
//               once on one host; by heartbeat at the latest between hosts), it left (close()), or the way broke. A
//               transport never connects again by itself: what was under way could be lost, or come twice.
//   push-back   send() never blocks and so never deadlocks two workers that send to each other; whoever sends much
//               looks at backlog() and waits (wait_below()). A receiver that does not read holds up only those who send
//               to it.
//   bounds      every length that comes from a peer is checked before memory is touched or taken for it: Limits. A peer
//               that breaks them is lost, with a cause that says so.
//
// Who does the work: a transport has threads of its own (tcp), or is driven by its owner through poll() and sleep()
// (shm), so that whoever waits for an answer can fetch it himself.
//
// Errors: send() throws PeerLost for a peer that is lost, InvalidArgument for a message above the limits.
// Thread-safety: all methods from any thread, but poll() and sleep(), which one thread at a time may call; Receiver's
// methods are called from that thread or the transport's own, for one peer never two at a time.
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
  // Outgoing: keeps `data` alive until it is read. Incoming: whoever holds it has the bytes for himself, to read and to
  // write; null: they are valid only as long as on_message() runs.
  std::shared_ptr<void> owner;
  // Outgoing: nobody else will read or write these bytes again, so they may change hands without a copy.
  bool unique = false;
};

struct Message {
  std::string body;
  std::vector<Piece> pieces;
  // Need not wake a receiver that sleeps at once: it may wait a millisecond for the receiver's next look. Only from
  // within the receiver's methods that the thread calls which will poll() or sleep() next, or say announce_waiting().
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
  // `body` is valid during the call; pieces may be moved from. Must not block, and must not throw: what a message means
  // is the receiver's business, also if it means nothing.
  virtual void on_message(int peer, std::string_view body, std::vector<Piece>& pieces) = 0;
  // After the peer's last message, once. `cause` is fit to print: "worker1 (pid 7) died: …".
  virtual void on_lost(int peer, const std::string& cause) = 0;

 protected:
  ~Receiver() = default;
};

class Transport {
 public:
  virtual ~Transport() = default;  // as close(), and joins the threads; no call to the receiver after it

  virtual std::string_view name() const = 0;  // "shm", "tcp"

  // Takes the message; see above. From within the receiver's methods too.
  virtual void send(int peer, Message message) = 0;
  // Bytes that send() took and the way has not taken yet.
  virtual size_t backlog(int peer) const = 0;
  // Returns when backlog(peer) is at most `bytes`, the peer is lost (PeerLost), or Timeout. Not from within the
  // receiver's methods. A transport that is driven by poll() must be polled meanwhile, by this thread or another.
  virtual void wait_below(int peer, size_t bytes, Deadline deadline) = 0;

  // For a transport that is driven by its owner; others have nothing to do here.
  virtual bool poll() { return false; }  // delivers what has come, bounded; returns whether there was anything
  virtual void sleep(std::chrono::nanoseconds) {}  // until poll() would find something, wake(), or the time is over
  virtual void wake() {}                           // from any thread

  // Says good-bye to all: peers get on_lost("… left"), after what was sent before and could still be delivered within
  // the deadline. Further send()s throw PeerLost. May be called again.
  virtual void close(Deadline flush) = 0;
};

}  // namespace muster::transport
