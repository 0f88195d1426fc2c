// Names for addresses in files: functions, and lines where there is debug information.
//
// By libdw (elfutils), which is loaded when the first name is wanted: a job that ends well does without it, and so does
// a host that has none: there the addresses stay as they are. Debug information is taken from the file itself alone;
// nothing is fetched from anywhere.
//
// Thread-safety: all of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace muster::launch {

struct Frame {
  std::string file;
  uint64_t offset = 0;  // the address in the file's own terms, as addr2line(1) takes it
};

// Of "./train +0x1234", as base/crash_report.h writes it; an empty file where it is none.
Frame parse_frame(std::string_view words);

// Names of more than 120 characters lose what stands in their brackets. For each frame "crash(int*) at train.cpp:42",
// "abort in libc.so.6", or "train +0x1234". Deep recursion is cut short: a function that follows itself more than three
// times becomes a line "… 57 times more". Files of any content; takes a few seconds at most.
std::vector<std::string> name_frames(const std::vector<Frame>& frames);

}  // namespace muster::launch
