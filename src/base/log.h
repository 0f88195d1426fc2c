// Logging to standard error: one line per call, written with one write(2), so that ranks do not mix up their lines.
//
//   MUSTER_LOG(kInfo) << "heap: " << bytes << " bytes";
//
// MUSTER_LOG_LEVEL (debug, info, warning, error; default warning) decides what is printed; the arguments of a silent
// line are not evaluated. Thread-safety: all of it.
#pragma once

#include "base/text.h"

namespace muster {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

LogLevel log_level();  // from the environment, read once

// For a process that must not wait for whoever reads its standard error, such as a launcher that serves a store: from
// now on, a line that would have to wait is left out. The next one says how many were.
void leave_out_lines_that_would_wait(bool on = true);

class LogLine {
 public:
  explicit LogLine(LogLevel level) : level_(level) {}
  ~LogLine();
  std::ostream& stream() { return stream_; }

 private:
  LogLevel level_;
  PlainOutput stream_;
};

}  // namespace muster

#define MUSTER_LOG(level)                                  \
  if (::muster::LogLevel::level < ::muster::log_level()) { \
  } else                                                   \
    ::muster::LogLine(::muster::LogLevel::level).stream()
