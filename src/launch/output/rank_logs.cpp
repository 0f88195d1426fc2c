#include "launch/output/rank_logs.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/text.h"
#include "launch/kit/pipe.h"
#include "launch/kit/text_table.h"
#include "muster/base/error.h"

namespace muster::launch {

// O_NONBLOCK: a FIFO of that name must not make the launcher wait for its reader.
LogFile::LogFile(const std::string& path, Mode mode)
    : fd_(::open(path.c_str(), O_WRONLY | O_CREAT | (mode.append ? 0 : O_TRUNC) | O_APPEND | O_CLOEXEC | O_NONBLOCK,
                 0666)) {
  if (fd_) {
    fd_ = above_standard(std::move(fd_));
  } else if (mode.must) {
    throw InvalidArgument(text("cannot write to '", path, "': ", std::generic_category().message(errno)),
                          "Choose another folder for the logs");
  } else {
    error_ = errno;
  }
}

void LogFile::append(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_.get(), bytes.data(), bytes.size());
    if (written > 0) {
      bytes.remove_prefix(static_cast<size_t>(written));
    } else if (written == 0 || errno != EINTR) {
      if (error_ == 0) error_ = written == 0 ? EIO : errno;
      lost_ += bytes.size();
      return;
    }
  }
}

RankLogs::RankLogs(std::string folder, bool files_only) : folder_(std::move(folder)), files_only_(files_only) {
  if (folder_.empty()) return;
  std::error_code error, none;
  std::filesystem::create_directories(folder_, error);
  if (!std::filesystem::is_directory(folder_, none))
    throw InvalidArgument(
        text("cannot make the folder '", folder_, "' for the logs", error ? ": " : "", error ? error.message() : ""),
        "Choose another one");
}

void RankLogs::open(int rank, LogFile::Mode mode) {
  if (folder_.empty() || files_.contains(rank)) return;
  const auto make = [&](const char* stream) {
    return std::make_unique<LogFile>((std::filesystem::path(folder_) / text("rank_", rank, '.', stream)).string(),
                                     mode);
  };
  files_[rank] = {make("out"), make("err")};
}

std::vector<int> RankLogs::descriptors() const {
  std::vector<int> descriptors;
  for (const auto& [rank, files] : files_)
    for (const auto& file : files) descriptors.push_back(file->fd());
  return descriptors;
}

std::string RankLogs::complaint() const {
  uint64_t lost = 0;
  int error = 0;
  for (const auto& [rank, files] : files_)
    for (const auto& file : files) {
      lost += file->lost();
      if (error == 0) error = file->error();
    }
  if (lost == 0) return {};
  return text(human_bytes(lost), " of the ranks' output are lost, since they could not be written to '", folder_,
              "': ", std::generic_category().message(error), '\n');
}

}  // namespace muster::launch
