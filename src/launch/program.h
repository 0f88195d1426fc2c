// Finds the program to start, and says in one sentence why one cannot be started.
//
// Thread-safety: as getenv(3).
#pragma once

#include <string>

namespace muster::launch {

// The path for execve(2): `name` itself where it has a slash, else what PATH has. InvalidArgument where it is missing,
// a folder or not executable.
std::string find_program(const std::string& name);

// InvalidArgument, or Unavailable where the system rather than the program is to blame, for execve(2)'s `error`.
[[noreturn]] void throw_exec_error(const std::string& path, int error);

}  // namespace muster::launch
