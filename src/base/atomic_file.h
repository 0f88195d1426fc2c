// Files that are there whole or not at all.
//
// The bytes go to a temporary file beside the target, `<target>.<random>.tmp`, which then takes the target's name
// (rename(2) replaces atomically). Who is killed in between leaves the temporary file; whoever owns the folder may
// remove it.
//
// Errors: Unavailable, naming the path, where it cannot be written; the file that was there before then still is.
// Thread-safety: write_file() all of it, an AtomicFile one thread; of several writers of one path, one wins.
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
  // `durable`: returns when file and name would survive the machine's end.
  void commit(bool durable);

 private:
  [[noreturn]] void fail(int error) const;

  std::filesystem::path path_;
  std::string temporary_;  // empty: there is none
  UniqueFd fd_;
};

void write_file(const std::filesystem::path& path, std::string_view bytes);

// fsync(2) of a folder: what was renamed into it or removed from it stays so.
void sync_folder(const std::filesystem::path& folder);

}  // namespace muster
