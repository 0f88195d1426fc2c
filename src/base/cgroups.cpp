#include "base/cgroups.h"

#include <fstream>
#include <string>

namespace muster {
namespace {

// The folders from `top` + `path` up to `top`.
std::vector<std::filesystem::path> upwards(const std::filesystem::path& top, std::string path) {
  std::vector<std::filesystem::path> folders;
  for (;; path.resize(path.rfind('/'))) {
    folders.push_back(top.string() + path);
    if (path.rfind('/') == std::string::npos) return folders;
  }
}

// The path of the first line "hierarchy:controllers:path" that is wanted; empty if none is.
// `is_wanted` gets "hierarchy" and ",controllers,".
template <typename IsWanted>
std::string path_where(const std::filesystem::path& root, const IsWanted& is_wanted) {
  std::ifstream membership(root / "proc/self/cgroup");
  for (std::string line; std::getline(membership, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos || !line.substr(second + 1).starts_with('/')) continue;
    if (is_wanted(line.substr(0, first), ',' + line.substr(first + 1, second - first - 1) + ','))
      return line.substr(second + 1);
  }
  return "";
}

}  // namespace

std::vector<std::filesystem::path> own_cgroups(const std::filesystem::path& root) {
  const auto path = path_where(root, [](const auto& number, const auto&) { return number == "0"; });
  if (path.empty()) return {};
  return upwards(root / "sys/fs/cgroup", path);
}

std::vector<std::filesystem::path> own_memory_cgroups_v1(const std::filesystem::path& root) {
  const auto path = path_where(
      root, [](const auto&, const auto& controllers) { return controllers.find(",memory,") != std::string::npos; });
  if (path.empty()) return {};
  return upwards(root / "sys/fs/cgroup/memory", path);
}

}  // namespace muster
