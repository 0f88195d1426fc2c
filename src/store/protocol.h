// What goes between a store's client and its server, over any stream of bytes.
//
// A connection carries one request at a time, each answered by one reply. Both are frames:
//
//   u32 length of the body (little-endian, at most kMaxBody; checked before anything is allocated) | body
//   request body:  u8 protocol version | u8 operation | all fields of Request
//   reply body:    u8 status (0, or 1 + ErrorCode) | all fields of Reply
//
// Numbers and strings are those of base/wire.h. Every frame carries all fields, used or not: about 70 bytes more than
// need be, and one encoding to test instead of nine. Times travel as the milliseconds that are left, since clocks
// differ; the server answers a wait that ends too late with Timeout. While a request waits, its client sends nothing; a
// byte then is an error. A server drops a connection that breaks these rules and tells it nothing.
//
// Between hosts a connection may be cut, and a client then sends its request again on another one (served_store.h). So
// each request names its client and its call, by which the server knows whether it has done that already (answers.h),
// and the server for which it is, which every reply names: what serves at the same address later knows nothing of it.
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
  uint64_t client = 0, call = 0;        // who sends it, and a number that grows with each of its requests
  uint64_t server = 0;                  // for which it is; 0: whichever serves there
};

struct Reply {
  // The error: code, message, advice. Without one, the fields below.
  std::optional<ErrorCode> error;
  std::string message, advice;
  std::optional<std::string> value;  // kGet, kTryGet, kCompareSet (what the key holds now), kWatch
  int64_t number = 0;                // kAdd: sum; kWatch: version; kNumKeys: count; kCompareSet, kErase: 1 or 0
  uint64_t server = 0;               // who answers, also with an error; 0: one to which no request is sent again
};

inline constexpr uint64_t kForever = UINT64_MAX;
uint64_t wait_ms(Deadline deadline);
Deadline deadline_of(uint64_t wait_ms);

// `value` of a decoded request is valid as long as `body`. Decoding throws Corrupt unless the body is exactly one
// message with the fields that its operation needs.
std::string encode(const Request& request);
std::string encode(const Reply& reply);
std::string frame(const Request& request);  // its body with the length before it
Request decode_request(std::string_view body);
Reply decode_reply(std::string_view body);

// The reply that stands for an error, and the error that a reply stands for.
Reply error_reply(const Error& error);
[[noreturn]] void throw_error(const Reply& reply);

}  // namespace muster::store
