#include "base/fork_count.h"

#include <pthread.h>

#include <atomic>

namespace muster {
namespace {
std::atomic<int> forks{0};

// When the program starts, and not with the first call of fork_count(): that may come only after a fork.
[[maybe_unused]] const int counts_forks =
    ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
}  // namespace

int fork_count() { return forks.load(std::memory_order_relaxed); }

}  // namespace muster
