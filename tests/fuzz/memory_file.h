// A file in memory with a name, for parsers that read files.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <string_view>

#include "base/fd.h"
#include "base/text.h"

namespace muster::test {

class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes = {}) : fd_(::memfd_create("muster-test", MFD_CLOEXEC)) {
    if (!fd_) throw_errno("making a memfd");
    while (!bytes.empty()) {
      const ssize_t written = ::write(fd_.get(), bytes.data(), bytes.size());
      if (written < 0) throw_errno("writing a memfd");
      bytes.remove_prefix(static_cast<size_t>(written));
    }
  }
  std::string path() const { return text("/proc/self/fd/", fd_.get()); }

 private:
  UniqueFd fd_;
};

}  // namespace muster::test
