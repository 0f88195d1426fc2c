// Parts of Muster that are libraries of their own, since they need another one that not every host has (MPI, UCX):
// loaded when they are asked for. Each gives one function with C linkage, whose name has a version in it.
//
// Thread-safety: a function without state.
#pragma once

#include <string>

namespace muster {

struct Plugin {
  void* function = nullptr;  // null: it could not be loaded, for
  std::string problem;       // fit to print
};

// Loads `file` from beside the program or library that Muster is in, else from wherever the loader looks: Muster's
// CMake targets give programs a run path to it. It stays until the process ends. `flags`: RTLD_LOCAL or RTLD_GLOBAL.
// `remedy`: what to do where it is not there, "install …".
Plugin load_plugin(const std::string& file, const char* function, int flags, const std::string& remedy);

}  // namespace muster
