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

#include <filesystem>
#include <string>
#include <string_view>

#include "base/fd.h"

namespace muster {

inline constexpr std::string_view kTemporaryEnding = ".tmp";

class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();  // removes the temporary file, unless commit() has renamed it

  void write(std::string_view bytes);
  // `durable`: returns only when the file and its name would survive a crash of the machine.
  void commit(bool durable);

 private:
  [[noreturn]] void fail(int error) const;

  std::filesystem::path path_;
  std::string temporary_;  // empty: there is none
  UniqueFd fd_;
};

void write_file(const std::filesystem::path& path, std::string_view bytes);

// fsync(2) of a folder: makes renames into it and removals from it durable.
void sync_folder(const std::filesystem::path& folder);

}  // namespace muster
