// The control groups that limit this process.
//
// Thread-safety: all functions.
#pragma once

#include <filesystem>
#include <vector>

namespace muster {

// The folders of this process's cgroups of version 2, the innermost first. `root`: another file
// system, for tests.
std::vector<std::filesystem::path> own_cgroups(const std::filesystem::path& root = "/");

// The same of version 1, where memory has cgroups of its own. None where version 2 limits it.
std::vector<std::filesystem::path> own_memory_cgroups_v1(const std::filesystem::path& root = "/");

}  // namespace muster
