// Wire: messages between the ranks of a group that have no memory in common. The one thing that a library or protocol
// must bring for Muster to make a backend of it (wire_backend.h).
//
// A message is bytes with a kind and a tag. A receive takes the oldest message from its peer with the same kind and
// tag, and has room for its bytes: the protocol above sees to that. Messages of different kinds never meet. No message
// is empty.
//
//   kAnnouncement, kData   of collectives: every send has its receive soon, in the same order, and never to oneself
//   kMessage, kReady       of at most kShortMessage bytes: a send completes whether or not the receive is there, as
//                          long as the peer's process runs; also to oneself; receives of kMessage from any source;
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
#include <vector>

#include "muster/base/deadline.h"

namespace muster::comm {

// A transfer that failed for no reason of its own: a connection is gone, or the wire is closed. Who or what is to blame
// is found by the backend.
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
  // Destroyed unfinished only after close(), or when wait() has thrown. The memory is the caller's again then.
  class Transfer {
   public:
    virtual ~Transfer() = default;
    // Until the memory may be used again. Returns the peer. Timeout (without text; the wire may be broken by one of
    // kAnnouncement, kData and kPayload) or WireBroken. Once.
    virtual int wait(Deadline deadline) = 0;
  };

  virtual ~Wire() = default;
  // The memory must stay until the transfer has been waited for, or is destroyed.
  virtual std::unique_ptr<Transfer> send(int peer, WireTag tag, const std::byte* data, size_t bytes) = 0;
  virtual std::unique_ptr<Transfer> receive(int peer, WireTag tag, std::byte* data,
                                            size_t bytes) = 0;  // kAnySource too
  // Calls fn(peer), once for each peer from which nothing more comes: it has closed its wire, or its connection broke.
  // On a thread of the wire, or of whoever calls it: fn does little, and nothing with the wire. Set once, before the
  // first transfer; not called any more when close() has returned.
  virtual void on_gone(std::function<void(int peer)> fn) = 0;
  // Receives a kMessage with this tag that has come, and that no receive waits for: at once, from whom comes first.
  // Returns the peer, or kAnySource where there is none yet. WireBroken.
  virtual int take(WireTag tag, std::byte* data, size_t bytes) = 0;
  // The peers from which nothing more comes: they have left, or their connection broke. What they sent before can still
  // be received.
  virtual std::vector<int> gone() = 0;
  // Ends it: what waits and what comes later gets WireBroken, here and, soon, on peers that wait for this rank.
  virtual void close() = 0;
};

}  // namespace muster::comm
