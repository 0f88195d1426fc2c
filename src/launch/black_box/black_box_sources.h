// Where black boxes come from: the processes that live on this host, and files.
//
// Live: every process with a rank's box (the launcher, the rank) has a link /proc/<pid>/fd/… to its memfd, which its
// user may open. So these functions find the boxes of a job by looking at all processes of this user.
//
// A file: `muster run --black-box FILE` writes, when a job fails:
//   "MUSTERBX" | format | time (CLOCK_MONOTONIC, ns) | number of ranks |
//   for each: rank's end in words (length, bytes) | number of words, words of the segment
//
// Thread-safety: all functions.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

#include "launch/kit/report_file.h"
#include "shm/black_box_reader.h"

namespace muster::launch {

struct RankBox {
  shm::BlackBoxSnapshot box;
  std::string end;             // the state of the rank: "running", "stopped", "killed by SIGKILL (9)", …
  std::vector<pid_t> holders;  // processes that have the box open, sorted; of a file: none
};

struct JobBoxes {
  std::string job;
  uint64_t taken_ns = 0;  // when they were read; CLOCK_MONOTONIC
  // By rank. A group has the same name in all boxes, and no other of these members has it: "world (2)" is the second,
  // also in the box of a rank that was not in the first.
  std::vector<RankBox> ranks;
};

// All jobs of this user on this host that have a box, by id.
std::vector<JobBoxes> find_jobs();

// The boxes of the job whose id begins with `job`, or that process `pid` (launcher or rank) belongs to; with neither,
// of the only job. InvalidArgument if there is no such job, or more than one.
JobBoxes find_black_boxes(const std::string& job, pid_t pid);

// InvalidArgument if the file does not exist, CorruptError if it is not a file of black boxes or is cut short.
JobBoxes read_black_boxes(const std::filesystem::path& file);

struct SavedBox {
  int fd;           // the memfd
  std::string end;  // of the rank
};
// Writes all or nothing. Unavailable if the file cannot be written.
void write_black_boxes(const std::filesystem::path& file, const std::vector<SavedBox>& boxes);
ReportFile black_box_report(const std::string& file);

}  // namespace muster::launch
