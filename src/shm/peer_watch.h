// The watch over peers: one thread that learns immediately when a process of the job dies.
//
// Each peer process is held by a pidfd (pidfd_open(2)), which becomes readable when the process ends, for any reason;
// there is no heartbeat and no polling. A pid may be used again, so pid and start time identify a process: if the
// process that has the pid started at another time, the peer has died. Pids that come from the peers' own sockets
// (SO_PEERCRED, exchange.h) a moment before need no start time. A peer is forgotten with the last subscription to it,
// and a subscription to a pid whose process has ended watches the new process with that pid.
//
// Ranks that are threads of this process cannot die unseen; they report their end themselves (Channel::leave()).
//
// Thread-safety: all methods. Callbacks run in the watch's thread, one at a time; after unsubscribe() returns, none of
// that subscription runs or will run. Do not call unsubscribe() from a callback.
#pragma once

#include <sys/types.h>

#include <cstdint>
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

  // Calls on_death(pid) for each of these processes that dies, perhaps twice; soon, if it has died already. The
  // caller's own pid is ignored.
  struct Process {
    Process(pid_t pid, uint64_t start = 0) : pid(pid), start(start) {}  // NOLINT(google-explicit-constructor)
    pid_t pid;
    uint64_t start;  // start_time_of(pid); 0 if it is not known
  };
  using OnDeath = std::function<void(pid_t)>;
  uint64_t subscribe(const std::vector<Process>& processes, OnDeath on_death);
  void unsubscribe(uint64_t id);

 private:
  struct Peer {  // a process
    Process process{0};
    UniqueFd pidfd;  // none: the process had ended before
    bool reported = false;
  };
  struct Subscription {
    std::vector<std::shared_ptr<Peer>> peers;
    OnDeath on_death;
  };

  void run();
  void wake();
  std::shared_ptr<Peer> peer_of(const Process& process);  // with the lock
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
