// Files with what the ranks print: FOLDER/rank_0.out, rank_0.err, rank_1.out, …, byte by byte as the ranks wrote it,
// without prefixes. They are emptied when the job begins, but not in a later epoch.
//
// Bytes that cannot be written (a full disk, a limit, a quota) are lost, and counted; the next bytes are tried again. A
// failing log neither stops a rank nor makes it wait, because the job is worth more than its log.
//
// Thread-safety: none.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"

namespace muster::launch {

class LogFile {
 public:
  struct Mode {
    bool must = true;     // without it, all that is written to a file that cannot be opened is lost
    bool append = false;  // to what is there
  };
  // InvalidArgument if it cannot be opened and `must` is set.
  LogFile(const std::string& path, Mode mode);
  explicit LogFile(const std::string& path) : LogFile(path, Mode()) {}

  void append(std::string_view bytes);

  int fd() const { return fd_.get(); }
  uint64_t lost() const { return lost_; }  // bytes
  int error() const { return error_; }     // of the first loss

 private:
  UniqueFd fd_;
  uint64_t lost_ = 0;
  int error_ = 0;
};

class RankLogs {
 public:
  RankLogs() = default;  // no files
  // Makes the folder. InvalidArgument if that fails.
  RankLogs(std::string folder, bool files_only);

  // Makes the files of a rank, unless it has them: a rank that is started again appends.
  void open(int rank, LogFile::Mode mode);

  // Null if there are no files.
  LogFile* out(int rank) { return file(rank, 0); }
  LogFile* err(int rank) { return file(rank, 1); }
  bool files_only() const { return files_only_; }

  std::vector<int> descriptors() const;
  // "12 KiB of the ranks' output are lost: …", a line; empty if nothing is lost.
  std::string complaint() const;

 private:
  LogFile* file(int rank, size_t stream) {
    const auto found = files_.find(rank);
    return found == files_.end() ? nullptr : found->second[stream].get();
  }
  std::string folder_;
  bool files_only_ = false;
  std::map<int, std::array<std::unique_ptr<LogFile>, 2>> files_;  // by rank: out and err
};

}  // namespace muster::launch
