// What the kernel tells about a process (proc(5)). A process that has ended gives the empty value.
//
// Thread-safety: pure functions.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace muster {

// In clock ticks since boot. A pid may be used again; pid and start time together identify one process.
uint64_t start_time_of(pid_t pid);
pid_t parent_of(pid_t pid);
char process_state(pid_t pid);  // 'R', 'S', 'T', 'Z' …

}  // namespace muster
