#include "base/log.h"

#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace muster {

LogLevel log_level() {
  static const LogLevel level = [] {
    const char* value = std::getenv("MUSTER_LOG_LEVEL");
    const std::string_view name = value ? value : "warning";
    if (name == "debug") return LogLevel::kDebug;
    if (name == "info") return LogLevel::kInfo;
    if (name == "error") return LogLevel::kError;
    return LogLevel::kWarning;
  }();
  return level;
}

LogLine::~LogLine() {
  static constexpr const char* kNames[] = {"debug", "info", "warning", "error"};
  const std::string line = std::string("muster ") + kNames[static_cast<int>(level_)] + ": " + stream_.str() + "\n";
  // Nothing can be done about a failed write to standard error.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace muster
