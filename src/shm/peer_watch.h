// The watch over peers: one thread that learns at once when a process of the job dies.
//
// Each peer process is held by a pidfd (pidfd_open(2)), which becomes readable at its end, however it ended; no
// heartbeat, no polling. The pids come from the peers' own sockets (SO_PEERCRED, exchange.h) a moment before; a process
// that died in between and whose pid was used again at once would be watched in its place, which the kernel's order of
// handing out pids makes practically impossible.
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

  // Calls on_death(pid) for each of `pids` that dies, soon for one that has died already; perhaps twice. The own pid is
  // ignored.
  using OnDeath = std::function<void(pid_t)>;
  uint64_t subscribe(std::vector<pid_t> pids, OnDeath on_death);
  void unsubscribe(uint64_t id);

 private:
  struct Peer {
    UniqueFd pidfd;
    bool dead = false;
  };
  struct Subscription {
    std::vector<pid_t> pids;
    OnDeath on_death;
  };

  void run();
  void wake();
  void report(pid_t pid);

  std::mutex mutex_;           // guards the tables
  std::mutex callback_mutex_;  // held while callbacks run; unsubscribe() waits for it
  std::map<pid_t, Peer> peers_;
  std::map<uint64_t, Subscription> subscriptions_;
  std::vector<pid_t> dead_on_arrival_;
  uint64_t next_id_ = 1;
  bool stop_ = false;
  UniqueFd wake_;
  std::thread thread_;
};

}  // namespace muster::shm
