#include "comm/failure_note.h"

#include <sstream>
#include <vector>

#include "base/text.h"

namespace muster::comm {

// code, subject's rank and pid, number of missing ranks, the ranks; a line of advice; the message.
std::string write_failure(const Error& error) {
  int subject = -1, pid = 0;
  std::vector<int> missing;
  if (const auto* const lost = dynamic_cast<const PeerLost*>(&error)) subject = lost->rank(), pid = lost->pid();
  if (const auto* const timeout = dynamic_cast<const Timeout*>(&error)) missing = timeout->missing();
  return text(static_cast<int>(error.code()), ' ', subject, ' ', pid, ' ', missing.size(), ' ', join(missing, " "),
              '\n', error.advice(), '\n', error.message());
}

std::exception_ptr read_failure(const std::string& note) {
  std::istringstream in(note);
  int code = 0, subject = 0, pid = 0;
  size_t count = 0;
  std::string line, advice;
  std::getline(in, line);
  std::istringstream first(line);
  first >> code >> subject >> pid >> count;
  std::vector<int> missing;
  for (int rank = 0; missing.size() < count && first >> rank;) missing.push_back(rank);
  std::getline(in, advice);
  const std::string message(
      in ? note.substr(static_cast<size_t>(in.tellg() < 0 ? static_cast<std::streamoff>(note.size())
                                                          : static_cast<std::streamoff>(in.tellg())))
         : std::string());
  if (first.fail() || missing.size() != count || !in)
    return std::make_exception_ptr(Corrupt("a peer's word about the failure cannot be read"));
  switch (static_cast<ErrorCode>(code)) {
    case ErrorCode::kPeerLost:
      return std::make_exception_ptr(PeerLost(subject, pid, message, advice));
    case ErrorCode::kTimeout:
      return std::make_exception_ptr(Timeout(message, missing, advice));
    case ErrorCode::kMismatch:
      return std::make_exception_ptr(Mismatch(message, advice));
    case ErrorCode::kAborted:
      return std::make_exception_ptr(Aborted(message, advice));
    case ErrorCode::kInvalidArgument:
      return std::make_exception_ptr(InvalidArgument(message, advice));
    default:
      return std::make_exception_ptr(Unavailable(message, advice));
  }
}

}  // namespace muster::comm
