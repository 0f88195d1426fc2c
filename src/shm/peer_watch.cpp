#include "shm/peer_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "base/pidfd.h"
#include "base/process.h"
#include "base/thread.h"
#include "muster/base/error.h"

namespace muster::shm {

PeerWatch::PeerWatch() : wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) throw_errno("eventfd");
}

PeerWatch::~PeerWatch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

void PeerWatch::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written =
      ::write(wake_.get(), &one, sizeof one);  // cannot fail: the counter does not fill up
}

// The process: a peer that is already watched, if it has not ended; otherwise a new one.
std::shared_ptr<PeerWatch::Peer> PeerWatch::peer_of(const Process& process) {
  const auto is_process = [&](const Process& other) {
    return other.pid == process.pid && (other.start == process.start || other.start == 0 || process.start == 0);
  };
  for (const auto& [id, subscription] : subscriptions_)
    for (const auto& peer : subscription.peers)
      if (pollfd end{peer->pidfd.get(), POLLIN, 0}; is_process(peer->process) && peer->pidfd && ::poll(&end, 1, 0) == 0)
        return peer;
  UniqueFd pidfd = open_pidfd(process.pid);
  if (!pidfd && errno != ESRCH)
    throw_errno("cannot watch a peer's process", errno == ENOSYS   ? "Muster needs a Linux kernel of 5.3 or later"
                                                 : errno == EMFILE ? "Raise the limit of open files (ulimit -n)"
                                                                   : "");
  // After pidfd_open(): the start time is that of the process that the pidfd holds, or of none if it has ended.
  if (process.start != 0 && start_time_of(process.pid) != process.start) pidfd = UniqueFd();
  return std::make_shared<Peer>(Peer{.process = process, .pidfd = std::move(pidfd)});
}

uint64_t PeerWatch::subscribe(const std::vector<Process>& processes, OnDeath on_death) {
  const std::lock_guard lock(mutex_);
  Subscription subscription{.peers = {}, .on_death = std::move(on_death)};
  for (const Process& process : processes)
    if (process.pid != ::getpid()) subscription.peers.push_back(peer_of(process));
  if (!subscription.peers.empty() && !thread_.joinable()) thread_ = start_thread("muster-watch", [this] { run(); });
  for (const auto& peer : subscription.peers)
    if (!peer->pidfd) dead_on_arrival_.push_back(peer);
  const uint64_t id = next_id_++;
  subscriptions_.emplace(id, std::move(subscription));
  wake();
  return id;
}

void PeerWatch::unsubscribe(uint64_t id) {
  const std::lock_guard no_callback(callback_mutex_);
  const std::lock_guard lock(mutex_);
  subscriptions_.erase(id);
}

void PeerWatch::report(const Peer* peer) {
  const std::lock_guard no_unsubscribe(callback_mutex_);
  std::vector<OnDeath> calls;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, subscription] : subscriptions_)
      if (std::any_of(subscription.peers.begin(), subscription.peers.end(),
                      [&](const auto& p) { return p.get() == peer; }))
        calls.push_back(subscription.on_death);
  }
  for (const auto& call : calls) call(peer->process.pid);
}

void PeerWatch::run() {
  for (;;) {
    std::vector<pollfd> items{{wake_.get(), POLLIN, 0}};
    std::vector<std::shared_ptr<Peer>> watched, dead;
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
      dead.swap(dead_on_arrival_);
      for (const auto& [id, subscription] : subscriptions_)
        for (const auto& peer : subscription.peers)
          if (peer->pidfd && !peer->reported && std::find(watched.begin(), watched.end(), peer) == watched.end())
            watched.push_back(peer);
    }
    for (const auto& peer : watched) items.push_back({peer->pidfd.get(), POLLIN, 0});
    for (const auto& peer : dead) report(peer.get());
    if (::poll(items.data(), items.size(), dead.empty() ? -1 : 0) < 0) continue;
    if (items[0].revents) {
      uint64_t count;
      [[maybe_unused]] const auto got = ::read(wake_.get(), &count, sizeof count);
    }
    for (size_t i = 0; i < watched.size(); ++i) {
      if (!items[i + 1].revents) continue;
      {
        const std::lock_guard lock(mutex_);
        watched[i]->reported = true;
      }
      report(watched[i].get());
    }
  }
}

}  // namespace muster::shm
