// Transport between the workers of one host: rings in shared memory (inbox.h), and large pieces by reference.
//
// A piece travels in one of three ways:
//   inline   up to kInline bytes: copied into the ring, and by the receiver out of it
//   lent     it lies in the sender's heap (an arena that all workers of the host map). One copy moves it there unless
//            it is there already and unique. The receiver uses it where it lies, as its own; when it releases it, a
//            record goes back, and the sender's heap has the block again
//   home     it lies in a block that the receiver itself lent: the receiver gets that block back, without a copy
//
// A lent block survives the death of either side: the receiver's mapping keeps the bytes if the sender dies, and the
// sender takes back what it lent to a peer that died. A block that is still lent to a living peer when the transport
// ends is never used again by its owner, because the peer's tensors must not change.
//
// Trust: the workers of a host belong to one user and check each other's lengths, so that a defect in one does not
// become a wild read in another. They do not defend against a peer that changes a message while it is read.
//
// Ranks that are threads of one process use the same rings. The owner drives the transport: poll(), sleep(). A worker
// may send to itself.
//
// The death of a process is detected by pidfd (peer_watch.h) and reported after what it had sent is delivered.
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
  std::vector<pid_t> pids;         // of `workers`, 0 if unknown; may be empty
  std::shared_ptr<shm::Arena> heap;
  std::shared_ptr<shm::PeerWatch> watch;
  std::string prefix;  // of the keys in the directory
  Limits limits;
};

inline constexpr size_t kInline = 8 << 10;

// A transport that its owner drives, with what an inbox in shared memory needs besides.
class PolledTransport : public Transport {
 public:
  // While hushed, arriving messages wake no thread from sleep(): the caller polls. Poll once more after hush(false).
  virtual void hush(bool on) = 0;
  virtual bool pending() const = 0;  // whether poll() would find something
  // Wakes the receivers of messages that could wait. poll() does so after a millisecond, sleep() immediately.
  virtual void announce_waiting() = 0;

  // A second thread may sleep behind the one that reads, unless unless() holds. It is woken by what comes while no
  // thread is in sleep(), and by wake_second(). The first thread must itself look for what came before its sleep()
  // returned.
  virtual void sleep_second(std::chrono::nanoseconds limit, const std::function<bool()>& unless) = 0;
  virtual void wake_second() = 0;
};

// Connects with the other workers of the host; blocks until all have come. Errors: as shm::exchange().
std::shared_ptr<PolledTransport> make_shm_transport(const ShmOptions& options, const shm::NoticeBoard& directory,
                                                    Receiver& receiver, Deadline deadline);

}  // namespace muster::transport
