// The error of a callee, as the caller gets it.
//
//   worker "ps" in forward(at::Tensor): std::out_of_range: no such key
//
// The callee sends an ErrorReply: the type's name and the message of any exception, also one that is not a
// std::exception. Thread-safety: values.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "muster/base/error.h"

namespace muster::rpc {

// Can be caught as muster::Remote too. message() and what() have the whole line above.
class RemoteError : public Remote {
 public:
  RemoteError(std::string worker, std::string function, std::string type, std::string remote_message,
              std::string advice = {});

  const std::string& worker() const noexcept { return worker_; }      // where the function ran
  const std::string& function() const noexcept { return function_; }  // "forward(at::Tensor)"
  const std::string& type() const noexcept { return type_; }          // "std::out_of_range", as the callee has it
  const std::string& remote_message() const noexcept { return remote_message_; }

 private:
  std::string worker_, function_, type_, remote_message_;
};

struct ErrorReply {
  std::string type, message, advice;
};

namespace detail {
ErrorReply describe(const std::exception_ptr& error);  // texts above 16 KiB are cut
std::string encode(const ErrorReply& reply);
ErrorReply decode_error(std::string_view bytes);  // Corrupt
std::exception_ptr remote_error(std::string worker, std::string function, ErrorReply reply);
}  // namespace detail

}  // namespace muster::rpc
