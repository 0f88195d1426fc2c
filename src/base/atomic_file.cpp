#include "base/atomic_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <mutex>
#include <set>
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

using FileId = std::pair<uint64_t, uint64_t>;

std::mutex under_way_mutex;
std::set<FileId>& under_way() {
  static auto* const all = new std::set<FileId>;  // threads may write at the end of the process
  return *all;
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path path, uint64_t front)
    : path_(std::move(path)), written_(front), begun_(front) {
  std::string temporary = text(path_.string(), ".", random_hex(4), kTemporaryEnding);
  fd_.reset(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd_) fail(errno);
  temporary_ = std::move(temporary);
  if (struct stat about{}; ::fstat(fd_.get(), &about) == 0) {
    id_ = {about.st_dev, about.st_ino};
    const std::lock_guard lock(under_way_mutex);
    under_way().insert(id_);
  }
}

AtomicFile::~AtomicFile() {
  if (temporary_.empty()) return;
  ::unlink(temporary_.c_str());
  forget();
}

void AtomicFile::forget() {
  const std::lock_guard lock(under_way_mutex);
  under_way().erase(id_);
}

bool is_being_written(const std::filesystem::path& file) noexcept {
  struct stat about {};
  if (::stat(file.c_str(), &about) != 0) return false;
  const std::lock_guard lock(under_way_mutex);
  return under_way().contains({about.st_dev, about.st_ino});
}

void AtomicFile::reserve(uint64_t bytes) {
  struct statfs about {};
  if (bytes == 0 || ::fstatfs(fd_.get(), &about) != 0 || about.f_type == BTRFS_SUPER_MAGIC) return;
  int status;
  do status = ::fallocate(fd_.get(), FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes));
  while (status != 0 && errno == EINTR);
  if (status == 0) return;
  if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG) fail(errno);  // otherwise the file system cannot do it
}

void AtomicFile::write_at(uint64_t offset, std::string_view bytes) {
  while (!bytes.empty()) {
    const auto written = ::pwrite(fd_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written >= 0) {
      bytes.remove_prefix(static_cast<size_t>(written));
      offset += static_cast<uint64_t>(written);
    } else if (errno != EINTR) {
      fail(errno);
    }
  }
}

void AtomicFile::write(std::string_view bytes) {
  constexpr uint64_t kAtATime = uint64_t{8} << 20;
  write_at(written_, bytes);
  written_ += bytes.size();
  if (written_ - begun_ < kAtATime) return;
  // Nothing depends on it: commit() waits for everything.
  ::sync_file_range(fd_.get(), static_cast<off_t>(begun_), static_cast<off_t>(written_ - begun_),
                    SYNC_FILE_RANGE_WRITE);
  begun_ = written_;
}

void AtomicFile::write_front(std::string_view bytes) { write_at(0, bytes); }

void AtomicFile::commit(bool durable) {
  if (durable && sync(fd_.get()) != 0) fail(errno);
  if (::close(fd_.release()) != 0) fail(errno);  // a full disk may be reported only here
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail(errno);
  temporary_.clear();
  forget();
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
