#include "launch/kit/report_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "base/file_text.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::launch {
namespace {

constexpr size_t kLook = 256;  // bytes, white space among them

// What stands in the way of a report; empty if nothing does. Another launcher may remove the file at any time.
std::string obstacle(const ReportFile& report) {
  const auto in_words = [](int error, std::string_view what) {
    const bool is_gone = error == ENOENT || error == ESTALE;
    return is_gone ? std::string() : text(what, std::generic_category().message(error));
  };
  std::error_code error;
  const auto folder = std::filesystem::path(report.path).parent_path();
  if (!folder.empty() && !std::filesystem::is_directory(folder, error))
    return text("there is no folder '", folder.string(), "'");
  struct stat found {};
  if (::lstat(report.path.c_str(), &found) != 0) return in_words(errno, "");
  if (S_ISDIR(found.st_mode)) return "a folder has this name";
  if (!S_ISREG(found.st_mode)) return "what has this name is not a regular file";
  const std::string bytes = first_bytes(report.path, kLook, error);
  if (error) return in_words(error.value(), "a file has this name, and cannot be read: ");
  const size_t start = bytes.find_first_not_of(" \t\r\n");
  const bool may_be_report =
      start == std::string::npos ? bytes.size() < kLook : bytes.substr(start).starts_with(report.begins);
  return may_be_report ? "" : "a file with other content has this name";
}

}  // namespace

void check_report(const ReportFile& file) {
  if (file.path.empty()) return;
  if (const std::string why = obstacle(file); !why.empty())
    throw InvalidArgument(text("cannot make the file '", file.path, "' for ", file.what, ": ", why),
                          "Choose another name, in a folder that is there");
}

void remove_report(const ReportFile& file) {
  if (!file.path.empty() && obstacle(file).empty()) ::unlink(file.path.c_str());
}

}  // namespace muster::launch
