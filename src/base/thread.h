// Threads of the library: named for debuggers, and with all signals blocked, because signals are for the program's own
// threads.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace muster {

// `name`: of at most 15 characters; longer ones are cut.
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace muster
