// Whether the kernel's out-of-memory killer killed a process: compares its counters now with those when the job began.
//
// Sources, in this order: memory.events of the cgroups around this process, whose counters include
// the groups below (cgroup v2), or memory.oom_control, whose counters do not (v1); if there are none,
// the count of the whole system in /proc/vmstat; and the kernel's log, if it may be read. Only the
// log names the process. The kernel counts before it kills, so a count that is read after a death
// includes that death.
//
// Thread-safety: const methods.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace muster::launch {

class OomWatch {
 public:
  explicit OomWatch(std::filesystem::path root = "/");

  struct Finding {
    bool known = false;   // a counter could be read
    bool killed = false;  // by the out-of-memory killer: this process, or one that cannot be distinguished from it
    std::string words;    // e.g. "the out-of-memory killer of the kernel ended it: …"; empty if not known
  };
  // For a process that SIGKILL has ended.
  Finding about(pid_t pid) const;

 private:
  struct Group {
    std::filesystem::path counters, limit;
    std::optional<uint64_t> kills;
  };
  std::optional<uint64_t> kills_of_system() const;
  bool in_kernel_log(pid_t pid) const;

  std::filesystem::path root_;
  std::vector<Group> groups_;  // of one version, the innermost first
  std::optional<uint64_t> system_;
};

}  // namespace muster::launch
