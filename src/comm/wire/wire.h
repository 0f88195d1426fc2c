// Wire: messages between the ranks of a group that share no memory. A library or protocol must implement only this for
// Muster to make a backend of it (wire_backend.h).
//
// A message is bytes with a kind and a tag. A receive takes the oldest message from its peer with the same kind and
// tag; the protocol above ensures that it has room for the message's bytes. Messages of different kinds never match. No
// message is empty.
//
//   kAnnouncement, kData   of collectives: every send has its receive soon, in the same order; never to oneself
//   kMessage, kReady       of at most kShortMessage bytes: a send completes whether or not the receive is there, as
//                          long as the peer's process runs; also to oneself; kMessage can be received from any source;
//                          take() looks for one that has come
//   kPayload               the receive is there before the send; also to oneself
//
// Thread-safety: all members of Wire from any thread; a Transfer belongs to one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "muster/base/deadline.h"

namespace muster::comm {

// A transfer failed because a connection is gone or the wire is closed. The backend finds out which rank or what caused
// that.
struct WireBroken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class WireKind : uint8_t { kAnnouncement, kData, kMessage, kReady, kPayload };
inline constexpr int kWireKinds = 5;
inline constexpr size_t kShortMessage = 304;
inline constexpr uint32_t kWireTags = uint32_t{1} << 28;  // tags are below

struct WireTag {
  WireKind kind = WireKind::kData;
  uint32_t value = 0;
  friend bool operator==(WireTag, WireTag) = default;
};

class Wire {
 public:
  // May be destroyed unfinished only after close(), or when wait() has thrown. Then the memory is the caller's again.
  class Transfer {
   public:
    virtual ~Transfer() = default;
    // Waits until the memory may be used again. Returns the peer. Called once. Throws WireBroken, or TimeoutError
    // without text; a TimeoutError of kAnnouncement, kData or kPayload may break the wire.
    virtual int wait(Deadline deadline) = 0;
  };

  virtual ~Wire() = default;
  // The memory must stay valid until the transfer has been waited for, or is destroyed.
  virtual std::unique_ptr<Transfer> send(int peer, WireTag tag, const std::byte* data, size_t bytes) = 0;
  virtual std::unique_ptr<Transfer> receive(int peer, WireTag tag, std::byte* data,
                                            size_t bytes) = 0;  // the peer may be kAnySource
  // Calls fn(peer) once for each peer from which nothing more comes: it has closed its wire, or its connection broke.
  // Calls it on a thread of the wire, or on one that calls the wire. fn must do little, and must not use the wire. Set
  // once, before the first transfer; not called any more when close() has returned.
  virtual void on_gone(std::function<void(int peer)> fn) = 0;
  // Receives the oldest kMessage with this tag that has come and that no receive waits for. Does not wait. Returns the
  // peer, or kAnySource if there is no such message yet. Throws WireBroken.
  virtual int take(WireTag tag, std::byte* data, size_t bytes) = 0;
  // The peers from which nothing more comes: they have left, or their connection broke. What they sent before can still
  // be received.
  virtual std::vector<int> gone() = 0;
  // The wire's keys in the store. `own`: this rank set them, and the others needed them until the group was made; this
  // rank erases them when it leaves. `of_all`: each rank set one; the last rank that leaves erases them.
  struct Keys {
    std::vector<std::string> own, of_all;
  };
  virtual Keys keys() const { return {}; }
  // Closes the wire. Transfers that wait and later ones get WireBroken, here and soon on peers that wait for this rank.
  virtual void close() = 0;
};

}  // namespace muster::comm
