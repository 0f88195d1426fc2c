#include "rpc/values/error_reply.h"

#include <cxxabi.h>

#include <typeinfo>

#include "base/byte_stream.h"
#include "base/text.h"
#include "muster/rpc/function.h"

namespace muster::rpc {
namespace {

// The longest text of each of the three. Together they stay below the size for which a thread that delivers messages
// might have to wait.
constexpr size_t kLongest = size_t{16} << 10;

void shorten(std::string& text) {
  if (text.size() <= kLongest) return;
  text.resize(kLongest);
  text += "…";
}

}  // namespace

namespace detail {

ErrorReply describe(const std::exception_ptr& error) {
  ErrorReply reply;
  try {
    std::rethrow_exception(error);
  } catch (const Error& caught) {
    reply = {type_name(typeid(caught)), caught.message(), caught.advice()};
  } catch (const std::exception& caught) {
    reply = {type_name(typeid(caught)), caught.what() ? caught.what() : "", {}};
  } catch (...) {
    const std::type_info* const type = abi::__cxa_current_exception_type();
    reply.type = type ? type_name(*type) : "an unknown exception";
    reply.message = "(not a std::exception)";
  }
  shorten(reply.type);
  shorten(reply.message);
  shorten(reply.advice);
  return reply;
}

std::string encode(const ErrorReply& reply) {
  WireWriter writer;
  writer.put(std::string_view(reply.type)).put(std::string_view(reply.message)).put(std::string_view(reply.advice));
  return writer.take();
}

ErrorReply decode_error(std::string_view bytes) {
  WireReader reader(bytes);
  ErrorReply reply;
  reply.type = reader.get_string();
  reply.message = reader.get_string();
  reply.advice = reader.get_string();
  reader.expect_done();
  return reply;
}

std::exception_ptr remote_error(std::string worker, std::string function, ErrorReply reply) {
  return std::make_exception_ptr(RemoteError(std::move(worker), std::move(function), std::move(reply.type),
                                             std::move(reply.message), std::move(reply.advice)));
}

}  // namespace detail
}  // namespace muster::rpc
