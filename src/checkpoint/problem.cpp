#include "checkpoint/problem.h"

#include <c10/util/Exception.h>

#include <exception>
#include <new>

namespace muster::checkpoint {

Problem problem_of(const std::function<void()>& fn) {
  const auto invalid = [](std::string message) {
    return Problem{static_cast<int>(ErrorCode::kInvalidArgument), std::move(message), {}};
  };
  try {
    fn();
    return {};
  } catch (const Error& error) {
    return {static_cast<int>(error.code()), error.message(), error.advice()};
  } catch (const c10::Error& error) {
    return invalid(error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return {static_cast<int>(ErrorCode::kUnavailable), "there is not enough memory for the snapshot", {}};
  } catch (const std::exception& error) {
    return invalid(error.what());
  } catch (...) {
    return invalid("an exception that is not a std::exception");
  }
}

void throw_problem(const Problem& problem) {
  switch (static_cast<ErrorCode>(problem.code)) {
    case ErrorCode::kMismatch:
      throw Mismatch(problem.message, problem.advice);
    case ErrorCode::kCorrupt:
      throw CorruptError(problem.message, problem.advice);
    case ErrorCode::kUnavailable:
      throw Unavailable(problem.message, problem.advice);
    case ErrorCode::kAborted:
      throw Aborted(problem.message, problem.advice);
    default:
      throw InvalidArgument(problem.message, problem.advice);
  }
}

}  // namespace muster::checkpoint
