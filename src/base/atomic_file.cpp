#include "base/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "base/random.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster {
namespace {

int sync(int fd) {
  int status;
  do status = ::fsync(fd);
  while (status != 0 && errno == EINTR);
  return status;
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)) {
  std::string temporary = text(path_.string(), ".", random_hex(4), kTemporaryEnding);
  fd_.reset(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd_) fail(errno);
  temporary_ = std::move(temporary);
}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const auto written = ::write(fd_.get(), bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      fail(errno);
    }
  }
}

void AtomicFile::commit(bool durable) {
  if (durable && sync(fd_.get()) != 0) fail(errno);
  if (::close(fd_.release()) != 0) fail(errno);  // a full disk may be reported only here
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail(errno);
  temporary_.clear();
  if (durable) sync_folder(path_.has_parent_path() ? path_.parent_path() : ".");
}

void AtomicFile::fail(int error) const {
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  throw_errno(error, text("cannot write ", path_.string()),
              full ? "Make room, or raise the limit" : "Check that its folder exists and may be written to");
}

void write_file(const std::filesystem::path& path, std::string_view bytes) {
  AtomicFile file(path);
  file.write(bytes);
  file.commit(false);
}

void sync_folder(const std::filesystem::path& folder) {
  const UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // EINVAL: some network file systems cannot do this; renames are durable there, or nothing is.
  if (!fd || (sync(fd.get()) != 0 && errno != EINVAL)) throw_errno(text("cannot sync the folder ", folder.string()));
}

}  // namespace muster
