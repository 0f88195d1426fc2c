#include "base/cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

#include "base/cgroups.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster {
namespace {

constexpr double kUnlimited = 1e6;

// The quota of one cgroup of version 2: 1.5 for "150000 100000"; kUnlimited for "max", or if there is no quota.
double quota_of(const std::filesystem::path& cgroup) {
  std::ifstream file(cgroup / "cpu.max");
  double quota = 0, period = 0;
  return file >> quota >> period && period > 0 ? quota / period : kUnlimited;
}

int bounded(size_t cores, double quota) {
  return std::max(1, static_cast<int>(std::min(static_cast<double>(cores), quota + 0.5)));
}

// Whether `rank` can have its own core, if ranks that have one may move to another of theirs (Kuhn's algorithm).
bool find_core(std::span<const CpuSet> ranks, size_t rank, std::vector<int>& owner, CpuSet& tried) {
  for (size_t cpu = 0; cpu < owner.size(); ++cpu) {
    if (!ranks[rank][cpu] || tried[cpu]) continue;
    tried[cpu] = true;
    if (owner[cpu] >= 0 && !find_core(ranks, static_cast<size_t>(owner[cpu]), owner, tried)) continue;
    owner[cpu] = static_cast<int>(rank);
    return true;
  }
  return false;
}

}  // namespace

CpuSet own_cpus() {
  CpuSet cpus;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) {  // EINVAL: the machine has more CPUs than the set holds
    for (long cpu = 0; cpu < std::min<long>(::sysconf(_SC_NPROCESSORS_ONLN), cpus.size()); ++cpu)
      cpus[static_cast<size_t>(cpu)] = true;
    return cpus;
  }
  for (size_t cpu = 0; cpu < std::min<size_t>(cpus.size(), CPU_SETSIZE); ++cpu) cpus[cpu] = CPU_ISSET(cpu, &set);
  return cpus;
}

std::string to_text(const CpuSet& cpus) {
  std::string text;
  for (size_t digit = cpus.size() / 4; digit-- > 0;) {
    size_t value = 0;
    for (size_t bit = 4; bit-- > 0;) value = 2 * value + cpus[4 * digit + bit];
    if (value > 0 || !text.empty() || digit == 0) text += "0123456789abcdef"[value];
  }
  return text;
}

CpuSet cpus_from_text(std::string_view text) {
  CpuSet cpus;
  if (text.empty() || text.size() > cpus.size() / 4) throw CorruptError("this is not a set of CPUs");
  for (size_t digit = 0; digit < text.size(); ++digit) {
    const size_t value = std::string_view("0123456789abcdef").find(text[text.size() - 1 - digit]);
    if (value == std::string_view::npos) throw CorruptError("this is not a set of CPUs");
    for (size_t bit = 0; bit < 4; ++bit) cpus[4 * digit + bit] = (value >> bit) & 1;
  }
  return cpus;
}

double cpu_quota(const std::filesystem::path& root) {
  double least = kUnlimited;
  for (const auto& cgroup : own_cgroups(root)) least = std::min(least, quota_of(cgroup));
  double micros = 0, period = 0;
  const auto first = root / "sys/fs/cgroup/cpu";  // of version 1
  std::ifstream quota(first / "cpu.cfs_quota_us"), of(first / "cpu.cfs_period_us");
  if (quota >> micros && of >> period && micros > 0 && period > 0) least = std::min(least, micros / period);
  return least;
}

int usable_cores(const std::filesystem::path& root) { return bounded(own_cpus().count(), cpu_quota(root)); }

int cores_together(std::span<const CpuSet> ranks) {
  CpuSet all;
  for (const CpuSet& cpus : ranks) all |= cpus;
  if (std::all_of(ranks.begin(), ranks.end(), [&](const CpuSet& cpus) { return cpus == all; }))
    return bounded(all.count(), cpu_quota());
  size_t last = 0;
  for (size_t cpu = 0; cpu < all.size(); ++cpu)
    if (all[cpu]) last = cpu;
  std::vector<int> owner(last + 1, -1);
  size_t placed = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    CpuSet tried;
    placed += find_core(ranks, rank, owner, tried);
  }
  return bounded(placed == ranks.size() ? all.count() : placed, cpu_quota());
}

}  // namespace muster
