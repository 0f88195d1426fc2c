#include "muster/base/error.h"

#include <cerrno>
#include <system_error>

#include "base/text.h"

namespace muster {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "InvalidArgument";
    case ErrorCode::kMismatch:
      return "Mismatch";
    case ErrorCode::kPeerLost:
      return "PeerLost";
    case ErrorCode::kTimeout:
      return "Timeout";
    case ErrorCode::kAborted:
      return "Aborted";
    case ErrorCode::kUnauthorized:
      return "Unauthorized";
    case ErrorCode::kUnavailable:
      return "Unavailable";
    case ErrorCode::kCorrupt:
      return "Corrupt";
    case ErrorCode::kRemote:
      return "Remote";
  }
  return "Error";
}

Error::Error(ErrorCode code, std::string message, std::string advice)
    : std::runtime_error(advice.empty() ? message : message + ". " + advice),
      code_(code),
      message_(std::move(message)),
      advice_(std::move(advice)) {}

void throw_errno(int error_number, std::string_view what, std::string advice) {
  // generic_category().message() is thread-safe, unlike strerror().
  throw Unavailable(text(what, ": ", std::generic_category().message(error_number)), std::move(advice));
}

void throw_errno(std::string_view what, std::string advice) { throw_errno(errno, what, std::move(advice)); }

}  // namespace muster
