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
      return "TimeoutError";
    case ErrorCode::kAborted:
      return "Aborted";
    case ErrorCode::kUnauthorized:
      return "Unauthorized";
    case ErrorCode::kUnavailable:
      return "Unavailable";
    case ErrorCode::kCorrupt:
      return "CorruptError";
    case ErrorCode::kRemote:
      return "RemoteError";
  }
  return "Error";
}

Error::Error(ErrorCode code, std::string message, std::string advice)
    : std::runtime_error(advice.empty() ? message : message + ". " + advice),
      code_(code),
      message_(std::move(message)),
      advice_(std::move(advice)) {}

RemoteError::RemoteError(std::string worker, std::string function, std::string type, std::string remote_message,
                         std::string advice)
    : ErrorOf(
          text("worker \"", worker, "\" in ", function, ": ", type, remote_message.empty() ? "" : ": ", remote_message),
          std::move(advice)),
      worker_(std::move(worker)),
      function_(std::move(function)),
      type_(std::move(type)),
      remote_message_(std::move(remote_message)) {}

void throw_errno(int error_number, std::string_view what, std::string advice) {
  // generic_category().message() is thread-safe, unlike strerror().
  throw Unavailable(text(what, ": ", std::generic_category().message(error_number)), std::move(advice));
}

void throw_errno(std::string_view what, std::string advice) { throw_errno(errno, what, std::move(advice)); }

}  // namespace muster
