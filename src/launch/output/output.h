// From the ranks' pipes to the launcher's own output, line by line.
//
// RankStream cuts the bytes of one pipe into lines; Printer puts the lines of all pipes that go to one Sink one after
// another. A '\r' ends a piece that the next piece is meant to overwrite, as progress bars do:
//
//   Style::kTerminal   The piece is a progress bar: drawn in place, removed for a line of another rank, and drawn again
//                      below it. A line that has no end yet (a prompt) is drawn in the same way.
//   Style::kLog        Only the last piece before a '\n' is printed.
//   Style::kUnchanged  '\r' is a byte like any other.
//
// A line is printed when it is complete. A line longer than kMaxLine is printed in pieces of that size, each as its own
// line (with kUnchanged no line end is added, so other ranks' lines may come between the pieces). If the bytes of a
// pipe end without a '\n', one is added, except with kUnchanged.
//
// The addresses that a rank writes when it dies of a fault (base/crash_report.h) are not printed, except with
// kUnchanged: the final report has the failing rank's addresses with names, and those of other ranks do not help.
//
// Thread-safety: none.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "launch/kit/pipe.h"
#include "launch/output/last_lines.h"
#include "launch/output/rank_logs.h"
#include "launch/output/sink.h"

namespace muster::launch {

enum class Style { kTerminal, kLog, kUnchanged };

inline constexpr size_t kMaxLine = 64 * 1024;

class Printer {
 public:
  explicit Printer(Sink& sink) : sink_(sink) {}

  Sink& sink() const { return sink_; }

  // Prints a complete line of `owner`, in place of its bar if it has one.
  void line(const void* owner, std::string_view prefix, std::string_view text, std::string_view end = "\n");
  // The bar at the bottom of the terminal, cut to its width: the one whose owner drew last.
  void bar(const void* owner, std::string_view prefix, std::string_view text);
  // Draws the bar again after lines. Call it before the sink is flushed.
  void redraw_bar();

 private:
  void clear();

  Sink& sink_;
  const void* bar_owner_ = nullptr;  // nullptr: no bar is drawn
  std::string bar_;
  bool bar_is_drawn_ = false;
};

class RankStream {
 public:
  RankStream() = default;
  // `tail` gets a copy of the bytes; may be null.
  RankStream(UniqueFd fd, Printer& printer, Style style, std::string prefix, LastLines* tail);

  // Copies every byte to `file`; with `only`, none goes to the printer. Null: no copy.
  void log_to(LogFile* file, bool only) {
    log_ = file;
    log_only_ = file && only;
  }

  // When nobody reads what the printer prints. False if there is no file that gets it either; then all is as before.
  bool stop_printing() { return log_only_ = log_ != nullptr; }

  void set_prefix(std::string prefix) { prefix_ = std::move(prefix); }

  bool open() const { return static_cast<bool>(fd_); }
  int fd() const { return fd_.get(); }
  Printer& printer() const { return *printer_; }

  // Reads the available bytes, up to `limit`. Returns how many there were; closes the pipe at its end.
  size_t read(size_t limit);
  // Reads the available bytes and closes the pipe, even if processes still hold its other end.
  void drain();
  void close();

 private:
  void feed(std::string_view bytes);
  void feed_unchanged(std::string_view bytes);
  void append(std::string_view bytes);
  void end_line();

  UniqueFd fd_;
  Printer* printer_ = nullptr;
  Style style_ = Style::kLog;
  std::string prefix_;
  LastLines* tail_ = nullptr;
  LogFile* log_ = nullptr;
  bool log_only_ = false;
  std::string line_;   // so far, since the last '\n' or '\r'
  std::string piece_;  // the last one that a '\r' ended, unless a '\n' came since
};

// "[3] " or, if there is a host, "[host:3] "; in the rank's colour if `colour`.
std::string prefix_of(const std::string& host, int rank, bool colour);

// As much of `text` as fits into `columns`, taking UTF-8 and terminal escapes into account.
std::string_view cut_to_columns(std::string_view text, int columns);

}  // namespace muster::launch
