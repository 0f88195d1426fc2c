// What a worker of the shm transport knows about another one: the two rings between them, and the blocks of heap that
// each has lent to the other.
//
// Thread-safety: see the members.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "shm/mapping.h"
#include "transport/shm/inbox.h"

namespace muster::transport::shm_rings {

// A ring as one of its two sides sees it.
struct Ring {
  RingControl* control = nullptr;
  std::byte* data = nullptr;
  size_t capacity = 0;

  std::byte* at(uint64_t position) const { return data + position % capacity; }
};

// A block of this worker's heap that a peer uses.
struct LentBlock {
  std::shared_ptr<void> owner;
  std::byte* data = nullptr;
  size_t bytes = 0;
};

class ShmTransport;

// A block of a peer's heap that this worker uses. The peer gets it back when the last tensor in it is freed.
struct Lease {
  std::weak_ptr<ShmTransport> transport;
  std::shared_ptr<shm::Mapping> heap;
  int peer = 0;
  uint64_t token = 0;
  std::byte* data = nullptr;
  size_t bytes = 0;
  bool home = false;  // it has gone back in a message

  ~Lease();
};

struct Peer {
  int rank = 0, place = 0;  // in the job, among the workers of the host
  pid_t pid = 0;
  std::shared_ptr<shm::Mapping> inbox, heap;
  Ring out, in;
  InboxHeader* header = nullptr;           // the peer's
  std::atomic<uint64_t>* ready = nullptr;  // the peer's word in which this worker has a bit
  uint64_t ready_bit = 0;

  std::mutex mutex;  // guards what follows, and the writing side of `out`
  uint64_t tail = 0;
  uint64_t sent = 0;               // bytes of messages, pieces included
  int unrung = 0;                  // messages that could wait, since the last ring of the bell
  std::deque<std::string> outbox;  // records that the ring had no room for
  std::unordered_map<uint64_t, LentBlock> lent;
  uint64_t next_token = 1;
  std::map<const std::byte*, Lease*> leases;  // of this peer's heap, by address
  std::optional<std::string> lost;            // the cause, once the peer is lost
  std::condition_variable room;
  int waiters = 0;  // in wait_below()

  std::atomic<bool> died{false};  // set by the watch
  // Used only by the polling thread:
  bool told = false;  // on_lost() has been called
  uint64_t head = 0;  // of `in`; the shared one is for the peer
};

}  // namespace muster::transport::shm_rings
