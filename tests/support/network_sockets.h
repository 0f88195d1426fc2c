// The sockets of a process, as /proc lists them.
//
// Thread-safety: all functions.
#pragma once

#include <dirent.h>
#include <sys/types.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "base/text.h"

namespace muster::test {

// The inodes of all sockets that it has open.
inline std::set<std::string> sockets_of(pid_t pid) {
  std::set<std::string> inodes;
  DIR* folder = ::opendir(text("/proc/", pid, "/fd").c_str());
  while (const dirent* entry = folder ? ::readdir(folder) : nullptr) {
    char target[64] = {};
    if (::readlink(text("/proc/", pid, "/fd/", entry->d_name).c_str(), target, sizeof target - 1) < 0) continue;
    const std::string name = target;
    if (name.starts_with("socket:[")) inodes.insert(name.substr(8, name.size() - 9));
  }
  if (folder) ::closedir(folder);
  return inodes;
}

// Those of a network that listen, are connected, or are bound to a UDP port: for each, its line of
// the kernel's table.
inline std::vector<std::string> network_sockets_of(pid_t pid) {
  const auto inodes = sockets_of(pid);
  std::vector<std::string> found;
  for (const char* table : {"tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6"}) {
    std::ifstream file(text("/proc/", pid, "/net/", table));
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      const std::vector<std::string> columns{std::istream_iterator<std::string>(words), {}};
      if (columns.size() > 9 && inodes.contains(columns[9])) found.push_back(text(table, ": ", line));
    }
  }
  return found;
}

}  // namespace muster::test
