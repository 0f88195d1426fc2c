#include "base/plugin.h"

#include <dlfcn.h>

#include <filesystem>
#include <system_error>

#include "base/text.h"

namespace muster {

Plugin load_plugin(const std::string& file, const char* function, int flags, const std::string& remedy) {
  Dl_info here{};
  std::string path = file;
  if (::dladdr(reinterpret_cast<void*>(&load_plugin), &here) != 0 && here.dli_fname) {
    const auto beside = std::filesystem::path(here.dli_fname).parent_path() / file;
    std::error_code ignored;
    if (std::filesystem::exists(beside, ignored)) path = beside.string();
  }
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | flags);
  if (!library)
    return {nullptr, text(file, " cannot be loaded (", ::dlerror(), "): ", remedy, ", and build Muster again")};
  if (void* const symbol = ::dlsym(library, function)) return {symbol, {}};
  return {nullptr, text(file, " is of another version of Muster: build it again")};
}

}  // namespace muster
