// The protocol between a store's client and its server, over any stream of bytes.
//
// A connection carries one request at a time, each answered by one reply. Both are frames:
//
//   u32 length of the body (little-endian, at most kMaxBody; checked before anything is allocated) | body
//   request body:  u8 protocol version | u8 operation | all fields of Request
//   reply body:    u8 status (0, or 1 + ErrorCode) | all fields of Reply
//
// Numbers and strings are those of base/byte_stream.h. Every frame carries all fields, used or not: that is about 70
// bytes more than necessary, and one encoding to test instead of nine. Times are sent as the milliseconds that are
// left, because clocks differ; the server answers a wait whose time has passed with TimeoutError. While a request
// waits, its client must send nothing. A server closes a connection that breaks these rules, without an answer.
//
// Between hosts a connection may be cut, and a client then sends its request again on another one (served_store.h). So
// each request names its client and its call, by which the server knows whether it has executed the request already
// (answers.h). It also names its server, as every reply does: a server that later serves at the same address knows
// nothing of the request.
//
// Thread-safety: values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/deadline.h"
#include "muster/base/error.h"

namespace muster::store {

inline constexpr uint8_t kProtocolVersion = 2;
inline constexpr uint32_t kMaxBody = 64u << 20;

enum class Op : uint8_t { kSet, kGet, kTryGet, kWait, kAdd, kCompareSet, kWatch, kErase, kNumKeys };
inline constexpr Op kLastOp = Op::kNumKeys;

struct Request {
  Op op = Op::kSet;
  std::vector<std::string> keys;        // one, except kWait (any number) and kNumKeys (none)
  std::string_view value;               // kSet, kCompareSet (desired)
  std::optional<std::string> expected;  // kCompareSet
  int64_t number = 0;                   // kAdd: delta; kWatch: after
  uint64_t wait_ms = 0;                 // kGet, kWait, kWatch: the time left; kForever: no end
  uint64_t client = 0, call = 0;        // the sender, and a number that grows with each of its requests
  uint64_t server = 0;                  // the addressee; 0: any server at that address
};

struct Reply {
  // An error: code, message, advice. If there is none, the fields below.
  std::optional<ErrorCode> error;
  std::string message, advice;
  std::optional<std::string> value;  // kGet, kTryGet, kCompareSet (what the key holds now), kWatch
  int64_t number = 0;                // kAdd: sum; kWatch: version; kNumKeys: count; kCompareSet, kErase: 1 or 0
  uint64_t server = 0;               // the sender, also with an error; 0: a server to which no request is sent again
};

inline constexpr uint64_t kForever = UINT64_MAX;
uint64_t wait_ms(Deadline deadline);
Deadline deadline_of(uint64_t wait_ms);

// `value` of a decoded request is valid as long as `body`. Decoding throws CorruptError unless the body is exactly one
// message with the fields that its operation needs.
std::string encode(const Request& request);
std::string encode(const Reply& reply);
std::string frame(const Request& request);  // the length, and the body
Request decode_request(std::string_view body);
Reply decode_reply(std::string_view body);

// The reply that stands for an error, and the error that a reply stands for.
Reply error_reply(const Error& error);
[[noreturn]] void throw_error(const Reply& reply);

}  // namespace muster::store
