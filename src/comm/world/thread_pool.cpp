#include "comm/world/thread_pool.h"

#include <ATen/Parallel.h>

#include <mutex>
#include <thread>

#include "base/fork_count.h"

namespace muster::comm {

void renew_thread_pool() {
  static std::mutex mutex;
  static int renewed = 0;
  const int forks = fork_count();
  if (forks == 0) return;
  const std::lock_guard lock(mutex);
  if (renewed == forks) return;
  std::thread([] { at::get_num_threads(); }).join();  // a new thread, because each thread asks only once
  renewed = forks;
}

}  // namespace muster::comm
