#include "comm/kit/failure_note.h"

#include <charconv>

#include "base/text.h"

namespace muster::comm {
namespace {

constexpr std::string_view kSeen = " [seen by rank ", kLast = "; last on rank ";

// Takes the part in brackets off a text of this form, and sets the finder that it names.
void split(std::string& what, int& finder) {
  const size_t at = what.rfind(kSeen);
  if (at == what.npos || !what.ends_with(']')) return;
  const char* const number = what.data() + at + kSeen.size();
  const char* const end = what.data() + what.size();
  int named = 0;
  const auto [after, failed] = std::from_chars(number, end, named);
  if (failed != std::errc() || !std::string_view(after, end).starts_with(kLast)) return;
  what.resize(at);
  finder = named;
}

}  // namespace

FailureReport failure_of(const Error& error, int finder) {
  FailureReport failure{.code = error.code(), .finder = finder, .what = error.message(), .advice = error.advice()};
  split(failure.what, failure.finder);
  if (const auto* const lost = dynamic_cast<const PeerLost*>(&error))
    failure.subject = lost->rank(), failure.pid = lost->pid();
  if (const auto* const timeout = dynamic_cast<const TimeoutError*>(&error)) failure.missing = timeout->missing();
  return failure;
}

std::exception_ptr error_of(const FailureReport& failure, int reader, std::string_view last) {
  const std::string &what = failure.what, &advice = failure.advice;
  const std::string message = text(what, kSeen, failure.finder, kLast, reader, ": ", last, "]");
  switch (failure.code) {
    case ErrorCode::kPeerLost:
      return std::make_exception_ptr(PeerLost(failure.subject, failure.pid, message, advice));
    case ErrorCode::kTimeout:
      return std::make_exception_ptr(TimeoutError(message, failure.missing, advice));
    case ErrorCode::kMismatch:
      return std::make_exception_ptr(Mismatch(what, advice));
    case ErrorCode::kAborted:
      return std::make_exception_ptr(Aborted(message, advice));
    case ErrorCode::kUnauthorized:
      return std::make_exception_ptr(Unauthorized(message, advice));
    case ErrorCode::kCorrupt:
      return std::make_exception_ptr(CorruptError(message, advice));
    default:  // an InvalidArgument, too: for the other ranks it is not their mistake, and the group has failed
      return std::make_exception_ptr(Unavailable(message, advice));
  }
}

std::string ended_by(int rank, const std::string& cause) { return text("rank ", rank, " ended: ", cause); }

// The note's format: a line with the code, the finder, the subject's rank and pid, the number of missing ranks and
// their ranks; a line of advice; the text.
std::string write_failure(const FailureReport& failure) {
  return text(static_cast<int>(failure.code), ' ', failure.finder, ' ', failure.subject, ' ', failure.pid, ' ',
              failure.missing.size(), ' ', join(failure.missing, " "), '\n', failure.advice, '\n', failure.what);
}

std::exception_ptr read_failure(const std::string& note, int reader, std::string_view last) {
  const size_t numbers_end = note.find('\n');
  const size_t advice_end = numbers_end == note.npos ? note.npos : note.find('\n', numbers_end + 1);
  PlainInput numbers(note.substr(0, numbers_end));
  FailureReport failure;
  int code = 0;
  size_t count = 0;
  numbers >> code >> failure.finder >> failure.subject >> failure.pid >> count;
  for (int rank = 0; failure.missing.size() < count && numbers >> rank;) failure.missing.push_back(rank);
  if (advice_end == note.npos || numbers.fail() || failure.missing.size() != count)
    return error_of(
        {.code = ErrorCode::kCorrupt, .finder = reader, .what = "a peer's note about the failure cannot be read"},
        reader, last);
  failure.code = static_cast<ErrorCode>(code);
  failure.advice = note.substr(numbers_end + 1, advice_end - numbers_end - 1);
  failure.what = note.substr(advice_end + 1);
  return error_of(failure, reader, last);
}

}  // namespace muster::comm
