#include "shm/spin.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>

#include "base/env.h"

namespace muster::shm {
namespace {

// CPUs' worth of time that the cgroup grants, or a large number. Reads the files of the own cgroup namespace's root,
// which is what a container sees as its limit.
double cgroup_cpus() {
  constexpr double kUnlimited = 1e9;
  std::string quota;
  double period = 0;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2 >> quota >> period && quota != "max" && period > 0)
    return std::stod(quota) / period;
  std::ifstream v1_quota("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), v1_period("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double micros = 0;
  if (v1_quota >> micros && v1_period >> period && micros > 0 && period > 0) return micros / period;
  return kUnlimited;
}

}  // namespace

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (::sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  if (const auto told = env_int(kJobCoresVariable); told && *told > 0 && *told <= 1 << 20)
    cores = static_cast<int>(*told);
  return std::max(1, std::min(cores, static_cast<int>(std::min(cgroup_cpus() + 0.5, 1e6))));
}

std::chrono::nanoseconds spin_for(int threads) {
  return threads <= usable_cores() ? std::chrono::nanoseconds(kSpin) : std::chrono::nanoseconds::zero();
}

}  // namespace muster::shm
