// What /proc tells about a process, for tables; a process that has ended meanwhile gives the empty value.
//
// Thread-safety: all of it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/process.h"

namespace muster::launch {

std::string command_of(pid_t pid);       // its words, separated by spaces and fit to print
std::string state_in_words(char state);  // of process_state(): "running", "stopped", "gone"

struct ProcessMemory {
  uint64_t resident = 0;  // bytes in memory, shared ones included
  uint64_t shared = 0;    // of these, memory shared with other processes: the ranks' heaps, /dev/shm; no files
};
ProcessMemory memory_of(pid_t pid);

}  // namespace muster::launch
