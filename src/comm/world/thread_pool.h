// libtorch's pool of threads in a forked process.
#pragma once

namespace muster::comm {

// In a forked process, makes libtorch create its thread pool again, which the fork has lost. Does nothing in any other
// process. libtorch itself would create it when a thread first asks how many threads there are, but without a lock: if
// two threads ask concurrently, one of them finds no pool and ends the process.
//
// Thread-safety: any number of threads may call this. Other threads may use libtorch only after it has returned.
void renew_thread_pool();

}  // namespace muster::comm
