#include "checkpoint/problem.h"

#include <c10/util/Exception.h>

#include <exception>
#include <new>
#include <string_view>

namespace muster::checkpoint {

bool is_lack_of_memory(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
         std::string_view(error.what()).find("DefaultCPUAllocator: ") != std::string_view::npos;
}

Problem problem_of(const std::function<void()>& fn) {
  const auto lack_of_memory = [] {
    return Problem{static_cast<int>(ErrorCode::kUnavailable), "there is not enough memory for the snapshot", {}};
  };
  const auto invalid = [](std::string message) {
    return Problem{static_cast<int>(ErrorCode::kInvalidArgument), std::move(message), {}};
  };
  try {
    fn();
    return {};
  } catch (const Error& error) {
    return {static_cast<int>(error.code()), error.message(), error.advice()};
  } catch (const c10::Error& error) {
    return is_lack_of_memory(error) ? lack_of_memory() : invalid(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return is_lack_of_memory(error) ? lack_of_memory() : invalid(error.what());
  } catch (...) {
    return invalid("an exception that is not a std::exception");
  }
}

Problem first_of(const std::vector<Problem>& of_ranks) {
  for (const Problem& problem : of_ranks)
    if (problem) return problem;
  return {};
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
