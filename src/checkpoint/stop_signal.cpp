#include "muster/checkpoint/stop_signal.h"

#include <signal.h>

#include <atomic>
#include <mutex>

#include "muster/base/error.h"

namespace muster {
namespace {

std::atomic<uint64_t> received{0};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "only then may a signal handler use it");

struct Handler {
  std::mutex mutex;
  int users = 0;
  uint64_t before = 0;
  struct sigaction previous {};
};

Handler& handler() {
  static Handler the;
  return the;
}

extern "C" void muster_count_sigterm(int) { received.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

StopSignal::StopSignal() {
  Handler& h = handler();
  const std::lock_guard lock(h.mutex);
  if (h.users == 0) {
    h.before = received.load();
    struct sigaction action {};
    action.sa_handler = muster_count_sigterm;
    action.sa_flags = SA_RESTART;  // the program's reads and writes do not fail with EINTR
    ::sigemptyset(&action.sa_mask);
    if (::sigaction(SIGTERM, &action, &h.previous) != 0) throw_errno("sigaction(SIGTERM)");
  }
  ++h.users;
  before_ = h.before;
}

StopSignal::~StopSignal() {
  Handler& h = handler();
  const std::lock_guard lock(h.mutex);
  if (--h.users > 0) return;
  struct sigaction current {};
  if (::sigaction(SIGTERM, nullptr, &current) == 0 && current.sa_handler == muster_count_sigterm)
    ::sigaction(SIGTERM, &h.previous, nullptr);
}

bool StopSignal::requested() const noexcept { return received.load(std::memory_order_relaxed) != before_; }

}  // namespace muster
