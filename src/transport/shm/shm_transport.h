// Transport between the workers of one host: rings in shared memory (inbox.h), and large pieces by reference.
//
// A piece travels in one of three ways:
//   inline   up to kInline bytes: copied into the ring, and by the receiver out of it
//   lent     it lies in the sender's heap (an arena that all workers of the host map), moved there by one copy unless
//   it
//            is there already and unique. The receiver uses it where it lies, as its own; when it lets go of it, a
//            record goes back and the sender's heap has the block again
//   home     it lies in a block that the receiver itself lent: it gets that block back, without a copy
//
// A block that is lent outlives both: the receiver's mapping keeps the bytes when the sender dies, and the sender takes
// back what it lent to a peer that died. What is still lent to living peers when the transport ends is never used again
// by its owner: their tensors must not change.
//
// Trust: the workers of a host belong to one user and check each other's lengths, so that a defect of one does not
// become a wild read of another. They do not defend against a peer that changes a message while it is read.
//
// Ranks that are threads of one process use the same rings. The transport is driven by its owner: poll(), sleep().
// A worker may send to itself.
//
// Death of a process is known by pidfd (peer_watch.h) and reported after what it had sent is delivered.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/deadline.h"
#include "shm/arena.h"
#include "shm/exchange.h"
#include "shm/peer_watch.h"
#include "transport/transport.h"

namespace muster::transport {

struct ShmOptions {
  int rank = 0;                    // of this worker, in the job
  std::vector<int> workers;        // the job's ranks on this host, this one included, in the same order everywhere
  std::vector<std::string> names;  // by rank, for messages
  std::vector<pid_t> pids;         // of `workers`, 0 where unknown; may be empty
  std::shared_ptr<shm::Arena> heap;
  std::shared_ptr<shm::PeerWatch> watch;
  std::string prefix;  // of the keys in the directory
  Limits limits;
};

inline constexpr size_t kInline = 8 << 10;

// A transport that its owner drives, as an inbox in shared memory needs it.
class PolledTransport : public Transport {
 public:
  // While hushed, messages that come wake nobody from sleep(): the caller polls. Poll once more after hush(false).
  virtual void hush(bool on) = 0;
  virtual bool pending() const = 0;  // whether poll() would find something
  // Wakes those who were sent messages that could wait. poll() does so a millisecond later, sleep() at once.
  virtual void announce_waiting() = 0;

  // A second thread may sleep behind the one that reads, unless() it need not. It is woken by what comes while nobody
  // is in sleep(), and by wake_second(). What came before the first one's sleep() returned, that one has to look for.
  virtual void sleep_second(std::chrono::nanoseconds limit, const std::function<bool()>& unless) = 0;
  virtual void wake_second() = 0;
};

// Meets the other workers of the host; blocks until all have come. Errors: as shm::exchange().
std::shared_ptr<PolledTransport> make_shm_transport(const ShmOptions& options, const shm::NoticeBoard& directory,
                                                    Receiver& receiver, Deadline deadline);

}  // namespace muster::transport
