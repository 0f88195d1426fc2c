// The messages of the agents. Each begins with a Header of fixed size:
//
//   Header | payload (msgpack, `payload` bytes) | note (`token` bytes) | references (`refs` of them) | table of tensors
//   and pieces beside it
//
//   kCall          run function `function` with the arguments in the payload, on object `object` if it is not 0, and
//                  send the result back; with kStore: keep the result as object `result` instead
//   kReply         the result of call `call`; empty if the result was stored
//   kError         call `call` failed: the payload is an ErrorReply
//   kCancel        nobody waits for `call` any more
//   kAddHolder     the sender has passed a reference to `object` on to worker `worker`, under number `token`
//   kHolds         the sender has received the reference that worker `worker`, not its owner, passed on under number
//                  `token`
//   kRelease       the sender releases one reference to `object`
//   kDrained       worker `worker` is lost, and the sender has read everything that it ever sent to the sender
//   kNotSent       the reference that kAddHolder announced could not be sent
//   kIdle          a round of a graceful shutdown: the sender is idle in round `token`, and has made `call` calls so
//                  far
//   kContextEnded  what the layer above calls `context` has ended at the sender (interceptor.h)
//
// An object's id is unique in the job: its creator's rank in the upper 16 bits, and that worker's count below.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "muster/base/error.h"

namespace muster::rpc {

enum class MessageKind : uint8_t {
  kCall = 1,
  kReply,
  kError,
  kCancel,
  kAddHolder,
  kHolds,
  kRelease,
  kDrained,
  kNotSent,
  kIdle,
  kContextEnded
};

constexpr uint8_t kStore = 1;   // keep the result
constexpr uint8_t kNoGrad = 2;  // grad mode is off at the caller, so it must be off in the function

struct Header {
  MessageKind kind = MessageKind::kCall;
  uint8_t flags = 0;
  uint16_t refs = 0;
  uint32_t timeout_ms = 0;  // kCall: how long the caller waits from now on; 0: for ever
  uint64_t call = 0;
  uint64_t function = 0;
  uint64_t object = 0;   // 0: none
  uint64_t result = 0;   // kCall with store: the id of the new object
  uint64_t token = 0;    // see above; kCall, kReply: the size of the note in bytes (interceptor.h)
  uint64_t context = 0;  // for the layer above (interceptor.h)
  int32_t worker = -1;
  uint32_t payload = 0;
};
static_assert(sizeof(Header) == 64);

// A reference inside a message.
struct RefRecord {
  uint64_t object = 0, token = 0;
  int32_t owner = -1;
  int32_t from = -1;  // the worker that passed it on
};
static_assert(sizeof(RefRecord) == 24);

template <typename T>
T read_pod(std::string_view& bytes) {
  if (bytes.size() < sizeof(T)) throw CorruptError("a message of the agent is shorter than it says");
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes.remove_prefix(sizeof value);
  return value;
}
template <typename T>
void append_pod(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

constexpr uint64_t object_id(int creator, uint64_t count) { return static_cast<uint64_t>(creator) << 48 | count; }
constexpr int creator_of(uint64_t object) { return static_cast<int>(object >> 48); }

}  // namespace muster::rpc
