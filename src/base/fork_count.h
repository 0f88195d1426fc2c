// How often this process is a fork: what holds threads, locks or counts that the parent still uses asks whether it was
// made in this process.
//
// Thread-safety: all functions.
#pragma once

namespace muster {

int fork_count();  // grows in a child; a load, no system call

}  // namespace muster
