// What went wrong on one rank, in a form that can be sent: the ranks exchange their problems, and all throw the same
// error.
//
// Thread-safety: values.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "muster/base/error.h"
#include "muster/comm/objects.h"

namespace muster::checkpoint {

struct Problem {
  int code = -1;  // an ErrorCode; -1: none
  std::string message, advice;
  MSGPACK_DEFINE(code, message, advice);

  explicit operator bool() const { return code >= 0; }
  bool is(ErrorCode other) const { return code == static_cast<int>(other); }
  std::string what() const { return advice.empty() ? message : message + ". " + advice; }
};

// Runs fn() and returns what it throws. An exception that is not Muster's counts as InvalidArgument (a save() or load()
// of the user has failed), except a lack of memory, which counts as Unavailable.
Problem problem_of(const std::function<void()>& fn);

// Whether it says that memory does not suffice: std::bad_alloc, or libtorch's own.
bool is_lack_of_memory(const std::exception& error);

Problem first_of(const std::vector<Problem>& of_ranks);  // the first that is not empty; otherwise an empty one
[[noreturn]] void throw_problem(const Problem& problem);

}  // namespace muster::checkpoint
