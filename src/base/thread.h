// Threads of the library: named for debuggers, and with all signals blocked, because signals belong to the program's
// own threads.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace muster {

// `name`: at most 15 characters; longer names are cut.
std::thread start_thread(const std::string& name, std::function<void()> body);

// Waits until `thread` has ended, if there is one. If it is the calling thread, detaches it instead: then it must soon
// end by itself, and whatever it still uses must live as long.
void join_or_detach(std::thread& thread);

}  // namespace muster
