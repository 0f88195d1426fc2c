// libtorch's pool of threads in a forked process.
#pragma once

namespace muster::comm {

// Has the pool made anew that a fork has lost; does nothing in a process that is none. libtorch would do so when a
// thread first asks how many threads there are, without a lock: of two threads that ask at once one finds no pool, and
// ends the process. Thread-safety: before other threads use libtorch, for those; any number of threads may call this.
void renew_thread_pool();

}  // namespace muster::comm
