// Packets: the format of messages on a fabric, and what workers leave in the directory.
//
//   header   80 bytes in the processors' order (little-endian): magic u32, kind u8, zero u8[3], from u32, count u32,
//            key u8[16], number u64, taken u64, body u64, total u64, size u64, offset u64
//
//   frame    a message: for each of its `count` pieces the size as u64; the body; then those pieces that have at most
//            kSmall bytes, each at a multiple of 64 bytes. Without pieces: the body alone. `total`: bytes of body and
//            pieces together, so that the size of a message is known before memory is allocated for it
//   piece    one of the larger pieces: the one with index `count`
//            Frames and pieces go in chunks of kChunk bytes, one packet per chunk: `size` bytes in all, and this
//            packet's bytes begin at `offset`
//   goodbye  the last message
//   hello, welcome, ready, ack, gone   nothing but the header; not numbered
//
// Packets may overtake each other, so frames and goodbyes are numbered from 1, and pieces have the number of their
// message. `taken` is the number of the last message of the other direction that has been delivered. `key` is the
// receiver's key from the directory, so that packets of another job can be dropped. It proves nothing more: a fabric is
// trusted.
//
//   entry    text: "muster-ucx<version> <key> <size> <pid> <heartbeat in ms> <address>", key and address in hexadecimal
//
// Thread-safety: values and functions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"
#include "transport/ucx/fabric.h"

namespace muster::transport::ucx {

using Key = std::array<unsigned char, 16>;
Key make_key();

enum class Kind : uint8_t { kHello = 1, kWelcome, kReady, kFrame, kPiece, kAck, kGoodbye, kGone };

struct Header {
  static constexpr uint32_t kMagic = 0x3158554d;  // "MUX1": the version is a part of it

  uint32_t magic = kMagic;
  Kind kind = Kind::kAck;
  uint8_t zero[3] = {};
  uint32_t from = 0;
  uint32_t count = 0;
  Key key{};
  uint64_t number = 0;
  uint64_t taken = 0;
  uint64_t body = 0;
  uint64_t total = 0;
  uint64_t size = 0, offset = 0;

  std::span<const std::byte> bytes() const { return std::as_bytes(std::span(this, 1)); }
  static Header parse(std::span<const std::byte> bytes);  // CorruptError if it is not a header
};
static_assert(sizeof(Header) == kMaxHeader);

inline constexpr size_t kSmall = 8 << 10;     // pieces of at most this size are copied into the frame
inline constexpr size_t kOffered = 64 << 10;  // packets with more data are offered

// The size of chunks. With chunks, a large piece shows signs of life, and heartbeats pass between them.
inline constexpr size_t kChunk = 1 << 20;
// How much may be under way to a peer: sent, and not yet delivered there.
inline constexpr uint64_t kWindow = uint64_t{8} << 20;
// When this much has been delivered, it is acknowledged immediately; less, with the next packet in the other direction.
inline constexpr uint64_t kAcknowledged = kWindow / 4;
// What a message counts in a window: its bytes, and an allowance for its other costs.
constexpr uint64_t cost_of(uint64_t bytes, size_t pieces) { return bytes + 256 + 64 * pieces; }

// A message as packets.
struct Frame {
  std::string data;  // of the frame
  uint64_t body = 0, total = 0;
  uint32_t count = 0;
  std::vector<uint32_t> large;  // the indices of pieces that are sent as separate packets
};
Frame pack(Message& message);  // takes the body, and copies large pieces that the sender may write to again

// The largest size that a frame with this header can have. CorruptError if the header breaks the limits.
size_t most_bytes(const Header& header, const Limits& limits);

// A received frame, whose data is in `block`. Small pieces lie in the block and keep it alive; the others have their
// sizes, and no data yet.
struct Unpacked {
  std::string_view body;
  std::vector<Piece> pieces;
  size_t missing = 0;  // of the pieces
};
Unpacked unpack(const Header& header, const Piece& block, const Limits& limits);  // CorruptError

struct Entry {
  Key key{};
  int size = 0, pid = 0;
  int64_t heartbeat_ms = 0;
  std::string address;

  std::string text() const;
  static Entry parse(std::string_view text);  // CorruptError; Mismatch if it is of another version
};

}  // namespace muster::transport::ucx
