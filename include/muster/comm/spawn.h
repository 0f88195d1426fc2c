// spawn(n, fn): starts n ranks as processes from inside a program, without muster run.
//
// Thread-safety: call it from a process that has not yet used libtorch's threads: a forked child has only the calling
// thread.
#pragma once

#include <functional>

#include "muster/comm/world.h"

namespace muster {

// Runs fn in n processes forked from this one, each with its own World (current in the calling thread), and waits for
// them. If one fails, ends the others and throws RemoteError with the rank, its signal or exception text, and its last
// lines on standard error. What fn changes in memory does not come back: use the World, files or pipes.
void spawn(int n, const std::function<void(World&)>& fn, const WorldOptions& options = {});

}  // namespace muster
