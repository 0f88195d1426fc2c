// What ranks tell each other, and their users, of a group's failure. On every rank and all backends it reads
//
//   <who failed, and why> [seen by rank <finder>; last on rank <reader>: <its operation>]. <What to do>
//
// for example "rank 1 (pid 4711) died [seen by rank 2; last on rank 0: all_reduce #12, finished]. Look at …". The
// finder is the rank whose report became the group's failure. It stays the finder if the failure goes on into another
// group, as between the groups of `hierarchical`. A Mismatch has no part in brackets: all ranks find it together, and
// its text says what each side called.
//
// Thread-safety: pure functions.
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/error.h"

namespace muster::comm {

// A failure, as the ranks of a group share it.
struct FailureReport {
  ErrorCode code = ErrorCode::kUnavailable;
  int subject = -1, pid = 0;  // of a PeerLost: the lost rank and its process
  std::vector<int> missing;   // of a TimeoutError
  int finder = 0;
  std::string what;  // without the part in brackets
  std::string advice;
};

// `finder`: if the error's text names none.
FailureReport failure_of(const Error& error, int finder);
// What rank `reader` throws. `last`: its last operation, and how far it came.
std::exception_ptr error_of(const FailureReport& failure, int reader, std::string_view last);

// "rank 3 ended: out of memory", of a rank that leaves because of an error.
std::string ended_by(int rank, const std::string& cause);

// A failure as a note that other ranks can read.
std::string write_failure(const FailureReport& failure);
// What rank `reader` throws; a CorruptError if `note` is not such a note.
std::exception_ptr read_failure(const std::string& note, int reader, std::string_view last);

}  // namespace muster::comm
