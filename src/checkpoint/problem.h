// What went wrong on one rank, in a form that travels: the ranks tell each other, and all throw the same.
//
// Thread-safety: values.
#pragma once

#include <functional>
#include <string>

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

// What fn() throws. Errors that are not Muster's count as InvalidArgument (somebody's save() or load() failed), but for
// a lack of memory.
Problem problem_of(const std::function<void()>& fn);

[[noreturn]] void throw_problem(const Problem& problem);

}  // namespace muster::checkpoint
