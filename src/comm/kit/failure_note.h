// What ranks tell each other, and their users, of a group's failure. On every rank, and all backends but nccl, it reads
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

#include "muster/base/error.h"

namespace muster::comm {

// The failure's text without the part in brackets, and the finder that this names; if there is none, `finder`.
struct Report {
  std::string what;
  int finder = 0;
};
Report report_of(const std::string& message, int finder);
// The text that rank `reader` shows of it. `last`: its last operation, and how far it came.
std::string shown_on(int reader, std::string_view last, const Report& report);

// Writes an Error as a note that other ranks can read and throw again. `finder`: the rank that reports it.
std::string write_failure(const Error& error, int finder);
// Returns the exception that the note describes, with the text for rank `reader`; a CorruptError if `note` is not such
// a note.
std::exception_ptr read_failure(const std::string& note, int reader, std::string_view last);

}  // namespace muster::comm
