#include "launch/kit/process_info.h"

#include <algorithm>
#include <fstream>

#include "base/file_text.h"
#include "base/text.h"
#include "launch/kit/text_table.h"

namespace muster::launch {

std::string command_of(pid_t pid) {
  std::string words = text_of_file(text("/proc/", pid, "/cmdline"));
  while (!words.empty() && words.back() == '\0') words.pop_back();
  return printable(words);
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
    PlainInput words(line);
    std::string name;
    uint64_t kib = 0;
    words >> name >> kib;
    if (name == "VmRSS:") memory.resident = kib * 1024;
    if (name == "RssShmem:") memory.shared = kib * 1024;
  }
  return memory;
}

}  // namespace muster::launch
