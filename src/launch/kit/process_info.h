// What /proc says about a process, for tables. For a process that has ended, the functions return empty values.
//
// Thread-safety: all functions.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/process.h"

namespace muster::launch {

std::string command_of(pid_t pid);       // its words, separated by spaces, without control characters
std::string state_in_words(char state);  // of process_state(): "running", "stopped", "gone"

struct ProcessMemory {
  uint64_t resident = 0;  // bytes in memory, shared ones included
  uint64_t shared = 0;    // of these, memory shared with other processes: the ranks' heaps, /dev/shm; no files
};
ProcessMemory memory_of(pid_t pid);

}  // namespace muster::launch
