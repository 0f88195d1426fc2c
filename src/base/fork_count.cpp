#include "base/fork_count.h"

#include <pthread.h>

#include <atomic>

namespace muster {
namespace {
std::atomic<int> forks{0};
}  // namespace

int fork_count() {
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return forks.load(std::memory_order_relaxed);
}

}  // namespace muster
