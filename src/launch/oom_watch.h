// Whether the kernel's out-of-memory killer was at work: what its counters say now, against when the job began.
//
// Sources, the surest first: the kernel's log, where it may be read and shows our process ids; memory.events of the
// cgroups around us, whose counter includes the groups below (cgroup v2); and the count of the whole system in
// /proc/vmstat. The kernel counts before it kills, so that what is read after a death includes it.
//
// Thread-safety: const methods, all of it.
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

  struct Verdict {
    bool known = false;   // there is a counter that can be read
    bool killed = false;  // by the out-of-memory killer: this process, or one that it is hard to tell from it
    std::string words;    // e.g. "the out-of-memory killer of the kernel ended it: …"; empty where not known
  };
  // About a process that SIGKILL has ended.
  Verdict about(pid_t pid) const;

 private:
  struct Group {
    std::filesystem::path folder;
    std::optional<uint64_t> kills;
  };
  std::optional<uint64_t> kills_of_system() const;
  bool in_kernel_log(pid_t pid) const;

  std::filesystem::path root_;
  std::vector<Group> groups_;  // the innermost first
  std::optional<uint64_t> system_;
};

}  // namespace muster::launch
