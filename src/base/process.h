// What the kernel tells about a process (proc(5)). A process that has ended gives the empty value.
//
// Thread-safety: pure functions.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace muster {

// In clock ticks since boot. A pid may be used again; pid and start time together identify one process.
uint64_t start_time_of(pid_t pid);
pid_t parent_of(pid_t pid);
char process_state(pid_t pid);  // 'R', 'S', 'T', 'Z' …

// The calling process's memory in bytes: its own pages, and its part of each page that several processes share. Pages
// of files (programs, libraries) do not count, because the kernel can drop them; an old kernel does not tell them
// apart. 0 if the kernel does not tell at all.
size_t memory_of_process();

// Gives memory that free() has kept for later back to the kernel, if the C library can.
void release_free_memory();

}  // namespace muster
