#include "launch/kit/report_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::launch {
namespace {

// Whether this regular file has nothing in it, or what reports of this kind begin with.
bool may_be_report(const std::string& path, std::string_view begins) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes(begins.size(), '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return file.gcount() == 0 ? file.eof() : bytes == begins;
}

// What stands in the way of a report; empty if nothing does.
std::string obstacle(const std::string& path, std::string_view begins) {
  std::error_code error;
  const auto folder = std::filesystem::path(path).parent_path();
  if (!folder.empty() && !std::filesystem::is_directory(folder, error))
    return text("there is no folder '", folder.string(), "'");
  struct stat found {};
  if (::lstat(path.c_str(), &found) != 0) return errno == ENOENT ? "" : std::generic_category().message(errno);
  if (S_ISDIR(found.st_mode)) return "a folder has this name";
  if (!S_ISREG(found.st_mode)) return "what has this name is not a regular file";
  return may_be_report(path, begins) ? "" : "a file with other content has this name";
}

}  // namespace

void replace_report(const std::string& path, std::string_view begins, std::string_view what) {
  if (const std::string why = obstacle(path, begins); !why.empty())
    throw InvalidArgument(text("cannot make the file '", path, "' for ", what, ": ", why),
                          "Choose another name, in a folder that is there");
  ::unlink(path.c_str());
}

void remove_report(const std::string& path, std::string_view begins) {
  if (!path.empty() && obstacle(path, begins).empty()) ::unlink(path.c_str());
}

}  // namespace muster::launch
