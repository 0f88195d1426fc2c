#include "train/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>

#include "base/fd.h"
#include "base/random.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::train {
namespace {

// Removes the temporary file unless it has got its final name.
struct Temporary {
  std::string path;
  bool keep = false;
  ~Temporary() {
    if (!keep) ::unlink(path.c_str());
  }
};

}  // namespace

void write_file(const std::filesystem::path& path, std::string_view bytes) {
  const auto fail = [&](int error) {
    throw_errno(error, text("cannot write ", path.string()), "Check that its folder exists and may be written to");
  };
  Temporary temporary{text(path.string(), ".", random_hex(4), ".svg.tmp")};
  UniqueFd fd(::open(temporary.path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd) {
    const int error = errno;
    temporary.keep = true;  // not ours
    fail(error);
  }
  while (!bytes.empty()) {
    const auto written = ::write(fd.get(), bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      fail(errno);
    }
  }
  if (::close(fd.release()) != 0) fail(errno);  // a full disk may only show here
  if (::rename(temporary.path.c_str(), path.c_str()) != 0) fail(errno);
  temporary.keep = true;
}

}  // namespace muster::train
