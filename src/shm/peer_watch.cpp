#include "shm/peer_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

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

uint64_t PeerWatch::subscribe(std::vector<pid_t> pids, OnDeath on_death) {
  std::erase(pids, ::getpid());
  const std::lock_guard lock(mutex_);
  for (const pid_t pid : pids) {
    if (peers_.contains(pid)) continue;
    const int fd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
    if (fd < 0 && errno != ESRCH) throw_errno("pidfd_open", "Muster needs a Linux kernel of 5.3 or later");
    peers_.emplace(pid, Peer{UniqueFd(fd), fd < 0});
  }
  if (!pids.empty() && !thread_.joinable()) thread_ = start_thread("muster-watch", [this] { run(); });
  const uint64_t id = next_id_++;
  for (const pid_t pid : pids)
    if (peers_.at(pid).dead) dead_on_arrival_.push_back(pid);
  subscriptions_.emplace(id, Subscription{std::move(pids), std::move(on_death)});
  wake();
  return id;
}

void PeerWatch::unsubscribe(uint64_t id) {
  const std::lock_guard no_callback(callback_mutex_);
  const std::lock_guard lock(mutex_);
  subscriptions_.erase(id);
}

void PeerWatch::report(pid_t pid) {
  const std::lock_guard no_unsubscribe(callback_mutex_);
  std::vector<OnDeath> calls;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, subscription] : subscriptions_)
      if (std::find(subscription.pids.begin(), subscription.pids.end(), pid) != subscription.pids.end())
        calls.push_back(subscription.on_death);
  }
  for (const auto& call : calls) call(pid);
}

void PeerWatch::run() {
  for (;;) {
    std::vector<pollfd> items{{wake_.get(), POLLIN, 0}};
    std::vector<pid_t> pids, dead;
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
      dead.swap(dead_on_arrival_);
      for (const auto& [pid, peer] : peers_) {
        if (peer.dead) continue;
        items.push_back({peer.pidfd.get(), POLLIN, 0});
        pids.push_back(pid);
      }
    }
    for (const pid_t pid : dead) report(pid);
    if (::poll(items.data(), items.size(), dead.empty() ? -1 : 0) < 0) continue;
    if (items[0].revents) {
      uint64_t count;
      [[maybe_unused]] const auto got = ::read(wake_.get(), &count, sizeof count);
    }
    for (size_t i = 0; i < pids.size(); ++i) {
      if (!items[i + 1].revents) continue;
      {
        const std::lock_guard lock(mutex_);
        auto& peer = peers_.at(pids[i]);
        peer.dead = true;
        peer.pidfd.reset();
      }
      report(pids[i]);
    }
  }
}

}  // namespace muster::shm
