// Files that appear complete or not at all.
//
// The bytes go to a temporary file beside the target, `<target>.<random>.tmp`, which then takes the target's name
// (rename(2) replaces atomically). A process that is killed in between leaves the temporary file; the owner of the
// folder may remove it.
//
// Errors: Unavailable, naming the path, if it cannot be written; a file that was there before is then unchanged.
// Thread-safety: write_file() from any thread; an AtomicFile belongs to one thread; if several write one path, one
// wins.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "base/fd.h"

namespace muster {

inline constexpr std::string_view kTemporaryEnding = ".tmp";

class AtomicFile {
 public:
  // `front`: bytes at the beginning that write_front() writes later.
  explicit AtomicFile(std::filesystem::path path, uint64_t front = 0);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();  // removes the temporary file, unless commit() has renamed it

  // Makes room for `bytes` in all, where the file system can: a full disk is known before anything is written. Not on
  // btrfs, which may compress the file and then need less.
  void reserve(uint64_t bytes);
  // The kernel begins to write to the disk meanwhile, so that commit() has less to wait for.
  void write(std::string_view bytes);
  void write_front(std::string_view bytes);
  // `durable`: returns only when the file and its name would survive a crash of the machine.
  void commit(bool durable);

 private:
  void forget();
  void write_at(uint64_t offset, std::string_view bytes);
  [[noreturn]] void fail(int error) const;

  std::filesystem::path path_;
  std::string temporary_;  // empty: there is none
  UniqueFd fd_;
  std::pair<uint64_t, uint64_t> id_;  // device and inode of the temporary file
  uint64_t written_ = 0, begun_ = 0;  // where the next bytes go, and up to where the kernel has been told to write
};

// Whether an AtomicFile of this process is writing this file, which is its temporary one.
bool is_being_written(const std::filesystem::path& file) noexcept;

void write_file(const std::filesystem::path& path, std::string_view bytes);

// fsync(2) of a folder: makes renames into it and removals from it durable.
void sync_folder(const std::filesystem::path& folder);

}  // namespace muster
