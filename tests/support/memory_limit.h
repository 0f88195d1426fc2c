// A control group for memory, of version 1 or 2, below the test's own. It ends with this object,
// whose processes must have ended before.
//
// Thread-safety: none.
#pragma once

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/text.h"
#include "support/patience.h"

namespace muster::test {

class MemoryLimit {
 public:
  explicit MemoryLimit(size_t bytes) {
    std::ifstream membership("/proc/self/cgroup");
    for (std::string line; std::getline(membership, line);) {
      const auto colon = line.find(':'), path = line.find(":/");
      if (colon == std::string::npos || path == std::string::npos) continue;
      const bool first = (line.substr(colon, path - colon) + ',').find("memory,") != std::string::npos;
      if (!first && !line.starts_with("0::/")) continue;
      limit(text("/sys/fs/cgroup", first ? "/memory" : "", line.substr(path + 1)), first, bytes);
      if (unavailable_reason_.empty()) return;
    }
  }
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;
  ~MemoryLimit() {
    if (!unavailable_reason_.empty()) return;
    // The kernel may hold it for a moment longer than its last process.
    for (const auto end = patience(); ::rmdir(folder_.c_str()) != 0 && errno == EBUSY && !end.passed();)
      ::poll(nullptr, 0, 1);
  }

  // Why there is none; empty if there is one.
  const std::string& unavailable_reason() const { return unavailable_reason_; }

  // The command, with itself and its children in the group.
  std::vector<std::string> around(const std::vector<std::string>& command) const {
    std::vector<std::string> words{"/bin/sh", "-c",
                                   text("echo $$ > ", (folder_ / "cgroup.procs").string(), R"( && exec "$@")"), "sh"};
    words.insert(words.end(), command.begin(), command.end());
    return words;
  }

 private:
  void limit(const std::filesystem::path& own, bool first, size_t bytes) {
    folder_ = own / text("muster-test-", ::getpid());
    if (::mkdir(folder_.c_str(), 0755) != 0) {
      unavailable_reason_ = text("no control group can be made in ", own.string(), ": ", std::strerror(errno));
      return;
    }
    if (write(first ? "memory.limit_in_bytes" : "memory.max", bytes)) {
      if (write(first ? "memory.memsw.limit_in_bytes" : "memory.swap.max", first ? bytes : 0) || !swaps()) {
        unavailable_reason_.clear();
        return;
      }
      unavailable_reason_ = "the kernel does not count what a control group swaps";
      ::rmdir(folder_.c_str());
      return;
    }
    unavailable_reason_ = text("a control group in ", own.string(), " cannot limit memory");
    ::rmdir(folder_.c_str());
  }
  static bool swaps() {
    std::ifstream file("/proc/swaps");
    std::string heading, device;
    std::getline(file, heading);
    return static_cast<bool>(file >> device);
  }
  bool write(const char* name, size_t value) const {
    if (!std::filesystem::exists(folder_ / name)) return false;
    std::ofstream file(folder_ / name);
    return static_cast<bool>(file << value << std::flush);
  }

  std::filesystem::path folder_;
  std::string unavailable_reason_ = "this system has no control groups for memory";
};

}  // namespace muster::test
