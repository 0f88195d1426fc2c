// What a file contains.
//
// Thread-safety: all functions.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>

#include "base/fd.h"

namespace muster {

// The file's bytes, as far as they can be read: none if there is no such file, or if it belongs to a process that has
// just ended. Reading such a file of /proc fails with ESRCH, which a std::istreambuf_iterator throws.
inline std::string text_of_file(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return std::move(text).str();
}

// The first `count` bytes of a regular file, or all if it has fewer. `error` says why they cannot be read.
inline std::string first_bytes(const std::filesystem::path& path, size_t count, std::error_code& error) {
  std::string bytes(count, '\0');
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  const ssize_t size = file ? ::read(file.get(), bytes.data(), count) : -1;
  error = size < 0 ? std::error_code(errno, std::generic_category()) : std::error_code();
  bytes.resize(size < 0 ? 0 : static_cast<size_t>(size));
  return bytes;
}

}  // namespace muster
