// How workers identify each other: what they leave in the directory, and the first bytes on a connection.
//
//   entry   text: "muster1 <key> <port> <address>…"; the key is 16 random bytes that this worker made, in hexadecimal.
//           Port 0: no worker connects to this one.
//   hello   52 bytes, each way: magic u8[8], version u32, answer u32, rank u32, to u32, size u32, pid u32,
//           heartbeat u32 (ms), key u8[16]
//
// The worker that connects sends the key of the worker that it wants to reach; the worker that accepts answers with
// the key of the worker that connected. This shows that both have read the job's directory, and have not reached a
// worker of an earlier job at the same port. Between hosts this comes on top of TLS, whose key is the proof. On one
// host without a secret it keeps other users out, since they cannot read the directory.
//
// Thread-safety: values and functions.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace muster::transport {

using HelloKey = std::array<unsigned char, 16>;
HelloKey make_hello_key();

struct Entry {
  HelloKey key{};
  uint16_t port = 0;
  std::vector<std::string> addresses;  // in the order in which to try them

  std::string text() const;
  static Entry parse(std::string_view text);  // CorruptError
};

inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr size_t kHelloBytes = 52;
inline constexpr size_t kMaxAddresses = 8;  // of one worker in the directory

enum class HelloAnswer : uint32_t { kWelcome, kOtherVersion, kOtherSize, kNotExpected };

struct Hello {
  uint32_t version = kProtocolVersion;
  HelloAnswer answer = HelloAnswer::kWelcome;  // of an answer
  uint32_t rank = 0, to = 0, size = 0, pid = 0;
  uint32_t heartbeat_ms = 0;
  HelloKey key{};

  std::string bytes() const;
  // CorruptError if it is not a greeting. Later versions may append fields, but not remove any.
  static Hello parse(std::string_view bytes);
};

// In constant time, so that a key cannot be guessed byte by byte.
bool same_key(const HelloKey& one, const HelloKey& other);

}  // namespace muster::transport
