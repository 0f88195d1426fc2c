#include "comm/kit/failure_note.h"

#include <charconv>
#include <sstream>
#include <vector>

#include "base/text.h"

namespace muster::comm {
namespace {

constexpr std::string_view kSeen = " [seen by rank ", kLast = "; last on rank ";

}  // namespace

Report report_of(const std::string& message, int finder) {
  const size_t at = message.rfind(kSeen);
  if (at == message.npos || !message.ends_with(']')) return {message, finder};
  const char* const number = message.data() + at + kSeen.size();
  const char* const end = message.data() + message.size();
  int named = 0;
  const auto [after, failed] = std::from_chars(number, end, named);
  if (failed != std::errc() || !std::string_view(after, end).starts_with(kLast)) return {message, finder};
  return {message.substr(0, at), named};
}

std::string shown_on(int reader, std::string_view last, const Report& report) {
  return text(report.what, kSeen, report.finder, kLast, reader, ": ", last, "]");
}

// The note's format: a line with the code, the finder, the subject's rank and pid, the number of missing ranks and
// their ranks; a line of advice; the message.
std::string write_failure(const Error& error, int finder) {
  int subject = -1, pid = 0;
  std::vector<int> missing;
  if (const auto* const lost = dynamic_cast<const PeerLost*>(&error)) subject = lost->rank(), pid = lost->pid();
  if (const auto* const timeout = dynamic_cast<const TimeoutError*>(&error)) missing = timeout->missing();
  const Report report = report_of(error.message(), finder);
  return text(static_cast<int>(error.code()), ' ', report.finder, ' ', subject, ' ', pid, ' ', missing.size(), ' ',
              join(missing, " "), '\n', error.advice(), '\n', report.what);
}

std::exception_ptr read_failure(const std::string& note, int reader, std::string_view last) {
  const size_t numbers_end = note.find('\n');
  const size_t advice_end = numbers_end == note.npos ? note.npos : note.find('\n', numbers_end + 1);
  std::istringstream numbers(note.substr(0, numbers_end));
  int code = 0, finder = 0, subject = 0, pid = 0;
  size_t count = 0;
  numbers >> code >> finder >> subject >> pid >> count;
  std::vector<int> missing;
  for (int rank = 0; missing.size() < count && numbers >> rank;) missing.push_back(rank);
  if (advice_end == note.npos || numbers.fail() || missing.size() != count)
    return std::make_exception_ptr(
        CorruptError(shown_on(reader, last, {"a peer's note about the failure cannot be read", reader})));
  const std::string advice = note.substr(numbers_end + 1, advice_end - numbers_end - 1),
                    what = note.substr(advice_end + 1), message = shown_on(reader, last, {what, finder});
  switch (static_cast<ErrorCode>(code)) {
    case ErrorCode::kPeerLost:
      return std::make_exception_ptr(PeerLost(subject, pid, message, advice));
    case ErrorCode::kTimeout:
      return std::make_exception_ptr(TimeoutError(message, missing, advice));
    case ErrorCode::kMismatch:
      return std::make_exception_ptr(Mismatch(what, advice));
    case ErrorCode::kAborted:
      return std::make_exception_ptr(Aborted(message, advice));
    case ErrorCode::kInvalidArgument:
      return std::make_exception_ptr(InvalidArgument(message, advice));
    case ErrorCode::kUnauthorized:
      return std::make_exception_ptr(Unauthorized(message, advice));
    case ErrorCode::kCorrupt:
      return std::make_exception_ptr(CorruptError(message, advice));
    default:
      return std::make_exception_ptr(Unavailable(message, advice));
  }
}

}  // namespace muster::comm
