// How fast one core reads what another core has written, for bench/rounds.py: reads a line, prints the time in
// microseconds of a copy of 256 KiB, and so on until the end of its input. Prints "none" if it has only one core.
//
// A virtual machine has faster and slower states, which last for seconds. Figures that were taken in different states
// cannot be compared, and this time tells the states apart.
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kBytes = 256 << 10;
constexpr int kCopies = 100;

std::vector<int> cores_of_this_process() {
  cpu_set_t set;
  CPU_ZERO(&set);
  ::sched_getaffinity(0, sizeof set, &set);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

void pin_this_thread(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  ::pthread_setaffinity_np(::pthread_self(), sizeof set, &set);
}

// The median of kCopies.
double microseconds_of_a_copy(int writer_core, int reader_core) {
  static std::vector<char> from(kBytes), to(kBytes);
  std::atomic<int> written{0}, read{0};
  std::thread writer([&] {
    pin_this_thread(writer_core);
    for (int i = 1; i <= kCopies; ++i) {
      std::memset(from.data(), i, kBytes);
      written.store(i, std::memory_order_release);
      while (read.load(std::memory_order_acquire) < i) {
      }
    }
  });
  std::vector<double> times;
  std::thread reader([&] {
    pin_this_thread(reader_core);
    for (int i = 1; i <= kCopies; ++i) {
      while (written.load(std::memory_order_acquire) < i) {
      }
      const auto start = std::chrono::steady_clock::now();
      std::memcpy(to.data(), from.data(), kBytes);
      const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
      times.push_back(time.count() + (to[kBytes / 2] == 0 ? 1e9 : 0));  // the copy cannot be left out
      read.store(i, std::memory_order_release);
    }
  });
  writer.join();
  reader.join();
  std::nth_element(times.begin(), times.begin() + kCopies / 2, times.end());
  return times[kCopies / 2];
}

}  // namespace

int main() {
  const auto cores = cores_of_this_process();
  for (std::string line; std::getline(std::cin, line);) {
    if (cores.size() < 2)
      std::puts("none");
    else
      std::printf("%.2f\n", microseconds_of_a_copy(cores[0], cores[1]));
    std::fflush(stdout);
  }
}
