// Finds the program to start, and says in one sentence why one cannot be started.
//
// Thread-safety: as getenv(3).
#pragma once

#include <string>

namespace muster::launch {

// The path for execve(2): `name` itself if it contains a slash, else the file that PATH has. InvalidArgument if it is
// missing, a folder or not executable.
std::string find_program(const std::string& name);

// Throws InvalidArgument for execve(2)'s `error`, or Unavailable if the cause is the system and not the program.
[[noreturn]] void throw_exec_error(const std::string& path, int error);

}  // namespace muster::launch
