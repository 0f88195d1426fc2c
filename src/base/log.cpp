#include "base/log.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdlib>
#include <string>
#include <string_view>

namespace muster {
namespace {

std::atomic<bool> leaves_out{false};
std::atomic<int> left_out{0};

}  // namespace

void leave_out_lines_that_would_wait(bool on) { leaves_out = on; }

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
  std::string line = std::string("muster ") + kNames[static_cast<int>(level_)] + ": " + stream_.str() + "\n";
  if (leaves_out) {
    pollfd reader{STDERR_FILENO, POLLOUT, 0};
    if (::poll(&reader, 1, 0) == 0) {
      left_out.fetch_add(1);
      return;
    }
    if (const int lost = left_out.exchange(0); lost > 0)
      line = "muster warning: " + std::to_string(lost) + " lines are lost, since nobody read them\n" + line;
    if (line.size() > PIPE_BUF) line.replace(PIPE_BUF - 4, std::string::npos, "...\n");  // a pipe has room for so much
  }
  // Nothing can be done about a failed write to standard error.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace muster
