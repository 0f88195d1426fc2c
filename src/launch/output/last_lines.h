// The last lines that a rank wrote to its standard error, bounded, and the exception that it reported there.
//
// Knows the two lines that libstdc++ prints for an uncaught exception:
//   terminate called after throwing an instance of 'std::runtime_error'
//     what():  no such file
// and the lines of a fault (base/crash_report.h), which it keeps apart from the others:
//   muster: SIGSEGV (11) at address 0x0, in thread 4711 'train'
//   muster: stack: ./train +0x1234
//
// Thread-safety: none.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace muster::launch {

inline constexpr std::string_view kStackLine = "muster: stack: ";  // how the lines of a stack begin

class LastLines {
 public:
  static constexpr size_t kMaxLines = 20, kMaxLineBytes = 1000, kMaxFrames = 100;

  void feed(std::string_view bytes);
  void finish();  // no more bytes will come: a last line without its end counts as a line, too

  const std::deque<std::string>& lines() const { return lines_; }
  const std::string& exception_type() const { return exception_type_; }  // empty: none was reported
  const std::string& exception_text() const { return exception_text_; }
  const std::string& fault() const { return fault_; }               // "SIGSEGV (11) at address 0x0, …"; empty: none
  const std::vector<std::string>& stack() const { return stack_; }  // "./train +0x1234", the failing frame first

 private:
  void end_line();

  std::deque<std::string> lines_;
  std::string line_;       // so far; at most kMaxLineBytes
  bool replaced_ = false;  // a '\r' came: the next byte starts the line anew
  bool cut_ = false;
  std::string exception_type_, exception_text_;
  std::string fault_;
  std::vector<std::string> stack_;
};

}  // namespace muster::launch
