#include "base/cgroups.h"

#include <fstream>
#include <string>

namespace muster {

std::vector<std::filesystem::path> own_cgroups(const std::filesystem::path& root) {
  std::vector<std::filesystem::path> folders;
  std::ifstream membership(root / "proc/self/cgroup");
  for (std::string line; std::getline(membership, line);) {
    if (!line.starts_with("0::/")) continue;
    for (std::string path = line.substr(3);; path.resize(path.rfind('/'))) {
      folders.push_back(root / ("sys/fs/cgroup" + path));
      if (path.rfind('/') == std::string::npos) break;
    }
  }
  return folders;
}

}  // namespace muster
