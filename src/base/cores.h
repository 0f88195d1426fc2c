// The cores that processes of this host may use.
//
// Thread-safety: all functions.
#pragma once

#include <bitset>
#include <span>
#include <string>
#include <string_view>

namespace muster {

// By number of the CPU; those from 1024 on, which sched_getaffinity(2) with cpu_set_t does not know either, are left
// out.
using CpuSet = std::bitset<1024>;

CpuSet own_cpus();  // the calling thread's affinity

std::string to_text(const CpuSet& cpus);       // hexadecimal, without leading zeros: "f", "8000000000000001"
CpuSet cpus_from_text(std::string_view text);  // Corrupt

// CPUs' worth of time that this process's cgroups grant (cpu.max of version 2, the cfs quota of version 1); a large
// number where there is no limit.
double cpu_quota();

// How many cores this process may use: its affinity, bounded by the quota; at least 1.
int usable_cores();

// How many cores the ranks of a host may use together, given the affinity of each. If each rank can have a core of its
// own, those of all of them, bounded by the quota; else fewer than there are ranks, whatever else some of them may use:
// ranks 0 and 1 on core 0 share it, though rank 2 has seven others. At least 1.
int cores_together(std::span<const CpuSet> ranks);

}  // namespace muster
