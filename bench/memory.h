// The memory of a process, as the benchmarks count it. peers/measure.py does the same.
//
// Thread-safety: all functions.
#pragma once

#include <malloc.h>

#include <fstream>
#include <string>

namespace bench {

// In MiB: the process's private pages, and its share of the pages that several map. Summed over the ranks, each page
// counts once, and a page that other processes map less.
inline double proportional_set_size() {
  std::ifstream in("/proc/self/smaps_rollup");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("Pss:")) return std::stod(line.substr(4)) / 1024;
  return 0;
}

// The same without the free memory that malloc keeps for later, which differs by tens of MiB from run to run.
inline double proportional_set_size_in_use() {
  ::malloc_trim(0);
  return proportional_set_size();
}

}  // namespace bench
