// Parts of Muster that are separate libraries, because they need another library that not every host has (MPI, UCX).
// They are loaded when they are first used. Each exports one function with C linkage, whose name contains a version.
//
// Thread-safety: a function without state.
#pragma once

#include <string>

namespace muster {

struct Plugin {
  void* function = nullptr;  // null: it could not be loaded
  std::string problem;       // why; can be printed
};

// Loads `file` from the folder of the program or library that contains Muster, or else from where the loader looks:
// Muster's CMake targets give programs a run path to it. It stays loaded until the process ends. `flags`: RTLD_LOCAL or
// RTLD_GLOBAL. `remedy`: what to do if the file is missing: "install …".
Plugin load_plugin(const std::string& file, const char* function, int flags, const std::string& remedy);

}  // namespace muster
