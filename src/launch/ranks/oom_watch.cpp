#include "launch/ranks/oom_watch.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string_view>

#include "base/cgroups.h"
#include "base/fd.h"
#include "base/text.h"
#include "launch/kit/text_table.h"

namespace muster::launch {
namespace {

constexpr const char* kWhatToDo = "use less memory in each rank (a smaller batch), or fewer ranks";
constexpr int kMostRecords = 100'000;  // of the kernel's log
// A cgroup of version 1 that has no limit names one above this.
constexpr uint64_t kNoLimit = uint64_t{1} << 60;

// The number after `name` in a file of "name number" lines.
std::optional<uint64_t> counter(const std::filesystem::path& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    PlainInput words(line);
    std::string key;
    uint64_t value = 0;
    if (words >> key >> value && key == name) return value;
  }
  return std::nullopt;
}

}  // namespace

OomWatch::OomWatch(std::filesystem::path root) : root_(std::move(root)), system_(kills_of_system()) {
  const auto add = [this](const std::filesystem::path& counters, const std::filesystem::path& limit) {
    groups_.push_back({counters, limit, counter(counters, "oom_kill")});
  };
  const auto first = own_memory_cgroups_v1(root_);
  for (const auto& folder : first) add(folder / "memory.oom_control", folder / "memory.limit_in_bytes");
  if (!first.empty()) return;
  for (const auto& folder : own_cgroups(root_)) add(folder / "memory.events", folder / "memory.max");
}

std::optional<uint64_t> OomWatch::kills_of_system() const { return counter(root_ / "proc/vmstat", "oom_kill"); }

// "…: Killed process 4711 (train) total-vm:…"; each read(2) gives one record.
bool OomWatch::in_kernel_log(pid_t pid) const {
  const UniqueFd log(::open((root_ / "dev/kmsg").c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!log) return false;
  const auto wanted = text("Killed process ", pid, ' ');
  char record[8192];
  for (int i = 0; i < kMostRecords; ++i) {
    const ssize_t size = ::read(log.get(), record, sizeof record);
    if (size == 0 || (size < 0 && errno != EPIPE && errno != EINTR)) break;  // EPIPE: records were overwritten
    if (size > 0 && std::string_view(record, static_cast<size_t>(size)).find(wanted) != std::string_view::npos)
      return true;
  }
  return false;
}

OomWatch::Finding OomWatch::about(pid_t pid) const {
  Finding finding;
  for (const auto& group : groups_) {
    if (!group.kills) continue;
    finding.known = true;
    const auto now = counter(group.counters, "oom_kill");
    if (!now || *now <= *group.kills) continue;
    // The innermost cgroup with a limit is the one that ran out of memory.
    std::string limit, raise;
    for (const auto& around : groups_) {
      uint64_t bytes = 0;
      std::ifstream file(around.limit);
      if (!limit.empty() || !(file >> bytes) || bytes >= kNoLimit) continue;
      limit = human_bytes(bytes);
      raise = ", or raise " + around.limit.filename().string();
    }
    finding.killed = true;
    finding.words =
        text("the kernel's out-of-memory killer ended it",
             limit.empty() ? "" : text(", since its cgroup has used up its ", limit), "; ", kWhatToDo, raise);
    return finding;
  }
  const auto now = kills_of_system();
  const bool other_kill = now && system_ && *now > *system_;
  const bool may_be_new = other_kill || !now || !system_;  // else what the log says is about an older process
  if ((other_kill && !finding.known) || (may_be_new && in_kernel_log(pid))) {
    finding.known = finding.killed = true;
    finding.words = text("the system ran out of memory, and the kernel's out-of-memory killer ended it; ", kWhatToDo);
    return finding;
  }
  // A kill that the cgroups around this process have not counted may have been in any other, perhaps one of the
  // process's own.
  finding.known = !other_kill && (finding.known || (now && system_));
  if (finding.known) finding.words = "somebody killed it; the system did not run out of memory";
  return finding;
}

}  // namespace muster::launch
