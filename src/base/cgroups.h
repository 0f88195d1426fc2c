// The control groups (cgroup v2) that limit this process.
//
// Thread-safety: all functions.
#pragma once

#include <filesystem>
#include <vector>

namespace muster {

// The folders of this process's cgroups, the innermost first. `root`: another file system, for tests.
std::vector<std::filesystem::path> own_cgroups(const std::filesystem::path& root = "/");

}  // namespace muster
