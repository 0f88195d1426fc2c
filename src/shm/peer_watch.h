// The watch over peers: one thread that learns immediately when a process of the job dies.
//
// Each peer process is held by a pidfd (pidfd_open(2)), which becomes readable when the process ends, for any reason;
// there is no heartbeat and no polling. The pids come from the peers' own sockets (SO_PEERCRED, exchange.h) a moment
// before. If a peer died in between and its pid was reused immediately, the new process would be watched instead; the
// order in which the kernel assigns pids makes that practically impossible. Later, a pid may well belong to another
// process. So a peer is forgotten with the last subscription to it, and a subscription to a pid whose process has ended
// watches the new process with that pid.
//
// Ranks that are threads of this process cannot die unseen; they report their end themselves (Channel::leave()).
//
// Thread-safety: all methods. Callbacks run in the watch's thread, one at a time; after unsubscribe() returns, none of
// that subscription runs or will run. Do not call unsubscribe() from a callback.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/fd.h"

namespace muster::shm {

class PeerWatch {
 public:
  PeerWatch();
  ~PeerWatch();

  // Calls on_death(pid) for each of `pids` that dies, perhaps twice; soon, if the process has died already. The
  // caller's own pid is ignored.
  using OnDeath = std::function<void(pid_t)>;
  uint64_t subscribe(std::vector<pid_t> pids, OnDeath on_death);
  void unsubscribe(uint64_t id);

 private:
  struct Peer {  // a process
    pid_t pid = 0;
    UniqueFd pidfd;  // none: the process had ended before
    bool reported = false;
  };
  struct Subscription {
    std::vector<std::shared_ptr<Peer>> peers;
    OnDeath on_death;
  };

  void run();
  void wake();
  std::shared_ptr<Peer> peer_of(pid_t pid);  // with the lock
  void report(const Peer* peer);

  std::mutex mutex_;                                // guards the tables
  std::mutex callback_mutex_;                       // held while callbacks run; unsubscribe() waits for it
  std::map<uint64_t, Subscription> subscriptions_;  // their peers are the ones that are watched
  std::vector<std::shared_ptr<Peer>> dead_on_arrival_;
  uint64_t next_id_ = 1;
  bool stop_ = false;
  UniqueFd wake_;
  std::thread thread_;
};

}  // namespace muster::shm
