// What a file contains.
//
// Thread-safety: all functions.
#pragma once

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

namespace muster {

// The file's bytes, as far as they can be read: none if there is no such file, or if it belongs to a process that has
// just ended. Reading such a file of /proc fails with ESRCH, which a std::istreambuf_iterator throws.
inline std::string text_of_file(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return std::move(text).str();
}

}  // namespace muster
