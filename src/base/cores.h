// The cores that processes of this host may use.
//
// Thread-safety: all functions.
#pragma once

#include <bitset>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace muster {

// Indexed by CPU number. CPUs from 1024 on are left out, as in cpu_set_t of sched_getaffinity(2).
using CpuSet = std::bitset<1024>;

CpuSet own_cpus();  // the calling thread's affinity

std::string to_text(const CpuSet& cpus);       // hexadecimal, without leading zeros: "f", "8000000000000001"
CpuSet cpus_from_text(std::string_view text);  // CorruptError

// How many CPUs' worth of time this process's cgroups grant (cpu.max of version 2, the cfs quota of version 1); a large
// number if there is no limit. `root`: another file system, for tests.
double cpu_quota(const std::filesystem::path& root = "/");

// How many cores this process may use: its affinity, bounded by the quota; at least 1.
int usable_cores(const std::filesystem::path& root = "/");

// How many cores the ranks of a host may use together, given the affinity of each rank. If each rank can have its own
// core, this is the number of all their cores, bounded by the quota. Otherwise it is the number of ranks that can have
// their own core, however many cores a single rank may use: if ranks 0 and 1 are bound to core 0, they share it, even
// if rank 2 has seven others. At least 1.
int cores_together(std::span<const CpuSet> ranks);

}  // namespace muster
