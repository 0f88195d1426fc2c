// Names for addresses in files: functions, and lines if there is debug information.
//
// libdw (elfutils) finds the names. It is loaded when the first name is needed, so a job that succeeds does not need
// it. If a host does not have it, the addresses stay as they are. Debug information comes only from the file itself;
// nothing is downloaded.
//
// Thread-safety: all functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace muster::launch {

struct StackFrame {
  std::string file;
  uint64_t offset = 0;  // the address within the file, as addr2line(1) takes it
};

// Parses "./train +0x1234", as base/crash_report.h writes it; `file` is empty if that fails.
StackFrame parse_stack_frame(std::string_view words);

// Names of more than 120 characters lose the text in their brackets. For each frame "crash(int*) at train.cpp:42",
// "abort in libc.so.6", or "train +0x1234". Deep recursion is cut short: a function that follows itself more than three
// times becomes a line "… 57 times more". Files of any content; takes a few seconds at most.
std::vector<std::string> name_frames(const std::vector<StackFrame>& frames);

}  // namespace muster::launch
