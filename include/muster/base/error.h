// Errors: what went wrong, on which rank, and what to do about it.
//
// Every failure that Muster reports is a muster::Error. Catch the base class to print its message, or a derived class
// to react: PeerLost has the rank, TimeoutError has the missing ranks. docs/errors.md lists each kind with its causes
// and cures.
//
// Thread-safety: errors are values; copies are independent.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace muster {

enum class ErrorCode {
  kInvalidArgument,  // the caller's mistake, found before anything was sent
  kMismatch,         // ranks disagree about an operation
  kPeerLost,         // a rank died or left
  kTimeout,          // a deadline passed
  kAborted,          // the group or World was shut down, or had failed before; or this thread has no World
  kUnauthorized,     // the other side did not prove that it belongs to the job or the user
  kUnavailable,      // a component, resource or service is not here
  kCorrupt,          // bytes are not what their format says
  kRemote,           // the callee's own error
};

// "PeerLost" for ErrorCode::kPeerLost, and so on: the name of the class.
std::string_view to_string(ErrorCode code);

class Error : public std::runtime_error {
 public:
  // what() is `message`, followed by ". " and `advice` if there is one.
  Error(ErrorCode code, std::string message, std::string advice = {});

  ErrorCode code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }  // what went wrong
  const std::string& advice() const noexcept { return advice_; }    // what to do; may be empty

 private:
  ErrorCode code_;
  std::string message_, advice_;
};

namespace detail {
template <ErrorCode kCode>
class ErrorOf : public Error {
 public:
  explicit ErrorOf(std::string message, std::string advice = {})
      : Error(kCode, std::move(message), std::move(advice)) {}
};
}  // namespace detail

class InvalidArgument : public detail::ErrorOf<ErrorCode::kInvalidArgument> {
  using ErrorOf::ErrorOf;
};
class Mismatch : public detail::ErrorOf<ErrorCode::kMismatch> {
  using ErrorOf::ErrorOf;
};
class Aborted : public detail::ErrorOf<ErrorCode::kAborted> {
  using ErrorOf::ErrorOf;
};
class Unauthorized : public detail::ErrorOf<ErrorCode::kUnauthorized> {
  using ErrorOf::ErrorOf;
};
class Unavailable : public detail::ErrorOf<ErrorCode::kUnavailable> {
  using ErrorOf::ErrorOf;
};
class CorruptError : public detail::ErrorOf<ErrorCode::kCorrupt> {
  using ErrorOf::ErrorOf;
};

// What code on another rank or worker threw; message() and what() say where and what.
class RemoteError : public detail::ErrorOf<ErrorCode::kRemote> {
 public:
  using ErrorOf::ErrorOf;
  // Of a remote call: worker "ps" in forward(at::Tensor): std::out_of_range: no such key
  RemoteError(std::string worker, std::string function, std::string type, std::string remote_message,
              std::string advice = {});

  // Empty if it comes from spawn().
  const std::string& worker() const noexcept { return worker_; }      // where the function ran
  const std::string& function() const noexcept { return function_; }  // "forward(at::Tensor)"
  const std::string& type() const noexcept { return type_; }          // "std::out_of_range", as the callee has it
  const std::string& remote_message() const noexcept { return remote_message_; }

 private:
  std::string worker_, function_, type_, remote_message_;
};

class PeerLost : public detail::ErrorOf<ErrorCode::kPeerLost> {
 public:
  // `rank` is the rank in the group whose operation failed; `pid` is its process, which is this process if ranks are
  // threads.
  PeerLost(int rank, int pid, std::string message, std::string advice = {})
      : ErrorOf(std::move(message), std::move(advice)), rank_(rank), pid_(pid) {}
  int rank() const noexcept { return rank_; }
  int pid() const noexcept { return pid_; }

 private:
  int rank_, pid_;
};

class TimeoutError : public detail::ErrorOf<ErrorCode::kTimeout> {
 public:
  // `missing`: the ranks that had not arrived; empty if the wait was not for ranks.
  explicit TimeoutError(std::string message, std::vector<int> missing = {}, std::string advice = {})
      : ErrorOf(std::move(message), std::move(advice)), missing_(std::move(missing)) {}
  const std::vector<int>& missing() const noexcept { return missing_; }

 private:
  std::vector<int> missing_;
};

// Throws Unavailable: "<what>: <text of errno>".
[[noreturn]] void throw_errno(std::string_view what, std::string advice = {});
[[noreturn]] void throw_errno(int error_number, std::string_view what, std::string advice = {});

}  // namespace muster
