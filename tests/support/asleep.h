// The event "that thread waits in its call": a thread that was found asleep in the kernel a few times in a row, and so
// has gone through what it does before it waits.
//
// Thread-safety: free functions are pure; OnceAsleep belongs to the thread that made it.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "base/file_text.h"
#include "base/text.h"

namespace muster::test {

// Whether the thread of this process sleeps in the kernel now.
inline bool is_asleep(pid_t thread) {
  const std::string line = text_of_file(text("/proc/self/task/", thread, "/stat"));
  const size_t name_end = line.rfind(')');
  return name_end != std::string::npos && line.substr(name_end + 2, 1) == "S";
}

// Whether all threads of this process sleep but the one that asks.
inline bool all_others_sleep() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    const auto thread = static_cast<pid_t>(std::stol(entry.path().filename().string()));
    if (thread != ::gettid() && !is_asleep(thread)) return false;
  }
  return true;
}

// Until the thread has been found asleep a few times in a row.
inline void await_sleep(pid_t thread) {
  for (int found = 0; found < 5; std::this_thread::yield()) found = is_asleep(thread) ? found + 1 : 0;
}

enum class Sleeper { kThread, kProcess };  // the thread that makes OnceAsleep, or all threads of its process

// Runs fn, in a thread of its own, once the sleeper is asleep. Not at all if it does not fall asleep while this lives.
class OnceAsleep {
 public:
  explicit OnceAsleep(std::function<void()> fn, Sleeper sleeper = Sleeper::kThread)
      : thread_([fn = std::move(fn), sleeper, maker = ::gettid()](const std::stop_token& stop) {
          for (int found = 0; found < 5; std::this_thread::yield()) {
            if (stop.stop_requested()) return;
            found = (sleeper == Sleeper::kThread ? is_asleep(maker) : all_others_sleep()) ? found + 1 : 0;
          }
          fn();
        }) {}

 private:
  std::jthread thread_;
};

}  // namespace muster::test
