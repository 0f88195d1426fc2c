// Reads a black box (black_box.h) of a rank that may be running, hanging, or have died at any point.
//
// Nothing in the segment is trusted: lengths are bounded, control characters in names are replaced, and a record that
// is being written, or that is invalid, is left out and counted. A segment with an invalid header is a CorruptError.
//
// Thread-safety: all of it; a snapshot is a value.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shm/black_box.h"

namespace muster::shm {

struct BlackBoxOperation {
  uint64_t ticket = 0;  // its place among all operations of the rank
  int group = -1;       // index into BlackBoxSnapshot::groups; -1: none, or one without a place
  std::string name, dtype;
  uint64_t sequence = kNoSequence, bytes = 0, tag = 0;
  int peer = -1;
  uint64_t posted_ns = 0, start_ns = 0, end_ns = 0;  // 0: not yet
  BlackBoxState state = BlackBoxState::kRunning;

  bool under_way() const { return state == BlackBoxState::kPosted || state == BlackBoxState::kRunning; }
  bool is_collective() const { return sequence != kNoSequence; }
  uint64_t since_ns() const { return start_ns != 0 ? start_ns : posted_ns; }
};

struct BlackBoxGroup {
  std::string name;  // "world"; "world (2)" for the second of that name and those members in this box
  uint64_t size = 0, members = 0, meeting = 0;
  std::string given_name = {};  // "world"
};

// The progress that the rank has reported.
struct BlackBoxTraining {
  std::optional<uint64_t> step, samples;     // nullopt: not reported
  uint64_t started_ns = 0, reported_ns = 0;  // the first and the last report; 0: there was none
  uint64_t reports = 0;
};

struct BlackBoxSnapshot {
  int rank = 0, world_size = 0;
  pid_t pid = 0;  // 0: the rank has not made a World yet
  uint64_t pid_start = 0;
  std::string host, job;
  uint64_t created_ns = 0;  // when the launcher, or else the rank, made the box; CLOCK_MONOTONIC
  int64_t realtime_ahead = 0;
  BlackBoxTraining training;
  std::vector<BlackBoxGroup> groups;
  uint64_t begun = 0;                         // operations in all
  std::vector<BlackBoxOperation> operations;  // by ticket; at most 4,096
  size_t unreadable = 0;                      // records left out
};

// `segment`: aligned to 8 bytes, as mappings and vectors of words are.
BlackBoxSnapshot read_black_box(std::span<const std::byte> segment);
// The box in a memfd, which may be open for reading only. CorruptError, too, if it is not a sealed memfd.
BlackBoxSnapshot read_black_box(int fd);
// The bytes of a box, for a file; read_black_box() understands them.
std::vector<uint64_t> copy_black_box(int fd);

std::string_view to_string(BlackBoxState state);  // "running"
// The name of the first, second, … group of a name: "world", "world (2)".
std::string numbered_group(const std::string& name, int number);

}  // namespace muster::shm
