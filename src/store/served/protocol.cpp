#include "store/served/protocol.h"

#include <chrono>
#include <cstring>

#include "base/byte_stream.h"
#include "base/text.h"

namespace muster::store {
namespace {

void put_optional(WireWriter& out, const std::optional<std::string>& string) {
  out.put(static_cast<uint8_t>(string.has_value())).put(std::string_view(string ? *string : std::string()));
}

std::optional<std::string> get_optional(WireReader& in) {
  const bool there = in.get<uint8_t>() != 0;
  const auto string = in.get_string();
  return there ? std::optional(std::string(string)) : std::nullopt;
}

}  // namespace

uint64_t wait_ms(Deadline deadline) {
  if (deadline.is_never()) return kForever;
  return static_cast<uint64_t>(std::chrono::ceil<std::chrono::milliseconds>(deadline.left()).count());
}

Deadline deadline_of(uint64_t wait_ms) {
  // Beyond a century it is forever; the bound keeps the nanoseconds from overflowing.
  constexpr uint64_t kCentury = 100ull * 366 * 24 * 3600 * 1000;
  if (wait_ms > kCentury) return Deadline::never();
  return Deadline::after(std::chrono::milliseconds(wait_ms));
}

std::string encode(const Request& request) { return frame(request).substr(sizeof(uint32_t)); }

std::string frame(const Request& request) {
  WireWriter out;
  out.put(uint32_t{0});  // the length, once it is known
  out.put(kProtocolVersion).put(request.op).put(request.number).put(request.wait_ms);
  out.put(request.client).put(request.call).put(request.server);
  out.put(static_cast<uint32_t>(request.keys.size()));
  for (const auto& key : request.keys) out.put(std::string_view(key));
  put_optional(out, request.expected);
  out.put(request.value);
  std::string bytes = out.take();
  const auto size = static_cast<uint32_t>(bytes.size() - sizeof(uint32_t));
  std::memcpy(bytes.data(), &size, sizeof size);
  return bytes;
}

Request decode_request(std::string_view body) {
  WireReader in(body);
  if (const auto version = in.get<uint8_t>(); version != kProtocolVersion)
    throw CorruptError(text("a request of protocol version ", int{version}, ", not ", int{kProtocolVersion}));
  Request request;
  request.op = in.get<Op>();
  if (request.op > kLastOp)
    throw CorruptError(text("a request for an unknown operation ", static_cast<int>(request.op)));
  request.number = in.get<int64_t>();
  request.wait_ms = in.get<uint64_t>();
  request.client = in.get<uint64_t>();
  request.call = in.get<uint64_t>();
  request.server = in.get<uint64_t>();
  const auto num_keys = in.get<uint32_t>();
  for (uint32_t i = 0; i < num_keys; ++i) request.keys.emplace_back(in.get_string());
  request.expected = get_optional(in);
  request.value = in.get_string();
  in.expect_done();
  const bool counts = request.op == Op::kWait || request.keys.size() == (request.op == Op::kNumKeys ? 0 : 1);
  if (!counts) throw CorruptError(text("a request with ", request.keys.size(), " keys"));
  return request;
}

std::string encode(const Reply& reply) {
  WireWriter out;
  out.put(static_cast<uint8_t>(reply.error ? 1 + static_cast<int>(*reply.error) : 0));
  out.put(std::string_view(reply.message)).put(std::string_view(reply.advice)).put(reply.number).put(reply.server);
  put_optional(out, reply.value);
  return out.take();
}

Reply decode_reply(std::string_view body) {
  WireReader in(body);
  Reply reply;
  const auto status = in.get<uint8_t>();
  if (status > 1 + static_cast<int>(ErrorCode::kRemote)) throw CorruptError(text("a reply with status ", int{status}));
  if (status > 0) reply.error = static_cast<ErrorCode>(status - 1);
  reply.message = in.get_string();
  reply.advice = in.get_string();
  reply.number = in.get<int64_t>();
  reply.server = in.get<uint64_t>();
  reply.value = get_optional(in);
  in.expect_done();
  return reply;
}

Reply error_reply(const Error& error) {
  Reply reply;
  reply.error = error.code();
  reply.message = error.message();
  reply.advice = error.advice();
  return reply;
}

void throw_error(const Reply& reply) {
  switch (*reply.error) {
    case ErrorCode::kTimeout:
      throw TimeoutError(reply.message, {}, reply.advice);
    case ErrorCode::kInvalidArgument:
      throw InvalidArgument(reply.message, reply.advice);
    case ErrorCode::kUnauthorized:
      throw Unauthorized(reply.message, reply.advice);
    case ErrorCode::kUnavailable:
      throw Unavailable(reply.message, reply.advice);
    default:
      throw Error(*reply.error, reply.message, reply.advice);
  }
}

}  // namespace muster::store
