// How many forks lie between this process and its origin. An object with threads, locks or counts that a parent still
// uses compares this number, to find out whether it was made in this process.
//
// Thread-safety: all functions.
#pragma once

namespace muster {

int fork_count();  // grows in a child; a load, no system call

}  // namespace muster
