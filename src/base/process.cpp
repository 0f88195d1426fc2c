#include "base/process.h"

#include <fstream>
#include <mutex>
#include <string>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "base/text.h"

namespace muster {
namespace {

// The fields of /proc/<pid>/stat after the name, which may itself contain spaces and parentheses; the first is field 3.
PlainInput stat_of(pid_t pid) {
  std::ifstream file(text("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(')');
  return PlainInput(name_end == std::string::npos ? std::string() : line.substr(name_end + 1));
}

}  // namespace

uint64_t start_time_of(pid_t pid) {
  auto fields = stat_of(pid);
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  uint64_t ticks = 0;
  return fields >> ticks ? ticks : 0;
}

pid_t parent_of(pid_t pid) {
  auto fields = stat_of(pid);
  char state = '\0';
  pid_t parent = 0;
  return fields >> state >> parent ? parent : 0;
}

char process_state(pid_t pid) {
  char state = '\0';
  return stat_of(pid) >> state ? state : '\0';
}

size_t memory_of_process() {
  std::ifstream file("/proc/self/smaps_rollup");
  size_t all = 0, without_files = 0;  // KiB
  for (std::string line; std::getline(file, line);) {
    const auto value = [&] { return std::stoul(line.substr(line.find(':') + 1)); };
    if (line.starts_with("Pss:")) all = value();
    if (line.starts_with("Pss_Anon:") || line.starts_with("Pss_Shmem:")) without_files += value();
  }
  return (without_files > 0 ? without_files : all) << 10;
}

void release_free_memory() {
#ifdef __GLIBC__
  // One thread at a time. In a process whose malloc is another (a sanitizer's, or one that is preloaded) the first call
  // initializes glibc's, which takes no lock: two threads at the same time would crash, then or at their end.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  ::malloc_trim(0);
#endif
}

}  // namespace muster
