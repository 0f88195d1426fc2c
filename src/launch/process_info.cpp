#include "launch/process_info.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>

#include "base/text.h"
#include "launch/text_table.h"

namespace muster::launch {
namespace {

// The fields of /proc/<pid>/stat after the name, which may itself hold spaces and brackets; the first is field 3.
std::string stat_of(pid_t pid) {
  std::ifstream file(text("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(')');
  return name_end == std::string::npos || name_end + 2 > line.size() ? "" : line.substr(name_end + 2);
}

}  // namespace

pid_t parent_of(pid_t pid) {
  std::istringstream fields(stat_of(pid));
  std::string state;
  pid_t parent = 0;
  return fields >> state >> parent ? parent : 0;
}

std::string command_of(pid_t pid) {
  std::ifstream file(text("/proc/", pid, "/cmdline"), std::ios::binary);
  std::string words((std::istreambuf_iterator<char>(file)), {});
  while (!words.empty() && words.back() == '\0') words.pop_back();
  return printable(words);
}

char process_state(pid_t pid) {
  const auto stat = stat_of(pid);
  return stat.empty() ? '\0' : stat.front();
}

std::string state_in_words(char state) {
  switch (state) {
    case 'T':
    case 't':
      return "stopped";
    case 'Z':
    case 'X':
    case '\0':
      return "gone";
    default:
      return "running";
  }
}

ProcessMemory memory_of(pid_t pid) {
  std::ifstream file(text("/proc/", pid, "/status"));
  ProcessMemory memory;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    uint64_t kib = 0;
    words >> name >> kib;
    if (name == "VmRSS:") memory.resident = kib * 1024;
    if (name == "RssShmem:") memory.shared = kib * 1024;
  }
  return memory;
}

}  // namespace muster::launch
