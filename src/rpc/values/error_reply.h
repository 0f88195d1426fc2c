// What a callee sends of an exception: the type's name and the message, also of one that is not a std::exception. The
// caller makes a RemoteError of it.
//
// Thread-safety: pure functions.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "muster/base/error.h"

namespace muster::rpc {

struct ErrorReply {
  std::string type, message, advice;
};

namespace detail {
ErrorReply describe(const std::exception_ptr& error);  // texts above 16 KiB are cut
std::string encode(const ErrorReply& reply);
ErrorReply decode_error(std::string_view bytes);  // CorruptError
std::exception_ptr remote_error(std::string worker, std::string function, ErrorReply reply);
}  // namespace detail

}  // namespace muster::rpc
