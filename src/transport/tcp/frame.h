// Frames: the format of messages on a connection.
//
//   header    16 bytes, little-endian: kind u8, zero u8[3], pieces u32, body bytes u64
//   table     a u64 for each piece: its bytes
//   body
//   pieces    one after another
//
// Only messages have more than a header; heartbeats and the good-bye are headers alone. The table comes before the
// body, so that the whole size of a frame is known, and checked against the limits, before memory is allocated for it.
// Even then memory is used only as bytes come: a frame that claims gigabytes and sends nothing costs nothing.
//
// Thread-safety: values; one thread at a time.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/piece.h"
#include "transport/transport.h"

namespace muster::transport {

enum class FrameKind : uint8_t { kMessage = 1, kHeartbeat = 2, kGoodbye = 3 };
inline constexpr size_t kFrameHeader = 16;

// Turns bytes into frames, in whatever portions they come.
class FrameParser {
 public:
  explicit FrameParser(const Limits& limits) : limits_(limits) {}

  // Takes from the front of `bytes`, up to the end of a frame. Returns whether a frame is complete: its kind, body and
  // pieces are then valid until the next call. Throws CorruptError if the bytes are not a frame or break the limits;
  // nothing can be read afterwards.
  bool take(std::span<const std::byte>& bytes);

  // Where the next bytes may be put instead of being handed to take(); empty unless a piece is under way.
  std::span<std::byte> room();
  // Says that the first `bytes` of room() have been filled; returns the same as take().
  bool filled(size_t bytes);

  FrameKind kind() const { return kind_; }
  std::string_view body() const { return body_; }
  std::vector<Piece>& pieces() { return pieces_; }

 private:
  enum class Part { kHeader, kTable, kBody, kPieces };

  void begin();
  bool collect(std::span<const std::byte>& bytes, size_t size);  // into head_; true once it holds `size` bytes
  void parse_header();
  void parse_size();
  bool next_piece();  // true if there was none left, so that the frame is complete

  const Limits limits_;
  Part part_ = Part::kHeader;
  bool whole_ = false;
  FrameKind kind_ = FrameKind::kHeartbeat;
  std::string head_;  // of the header, or of an entry of the table
  size_t body_bytes_ = 0, total_ = 0;
  size_t num_pieces_ = 0;
  std::vector<uint64_t> sizes_;  // as far as the table has come
  std::string body_;
  std::vector<Piece> pieces_;
  size_t filled_ = 0;  // of the last of pieces_
};

// An outgoing frame. Small parts are copied into one block behind the header; large parts are written from where they
// lie, and are held until then. A large part that its sender may write to again is `lent` until it is copied.
class Outgoing {
 public:
  explicit Outgoing(FrameKind kind);
  explicit Outgoing(Message message);
  Outgoing(Outgoing&&) noexcept = default;
  Outgoing& operator=(Outgoing&&) noexcept = default;

  // What is left of the frame, in order. The list is valid until taken(); what it points to, until the frame's end.
  std::span<const iovec> rest() const { return std::span(parts_).subspan(next_); }
  size_t bytes() const { return left_; }
  // Says that the first `bytes` of the rest are written; at most bytes().
  void taken(size_t bytes);

  struct Lent {
    size_t part = 0;  // its index in parts_
    std::shared_ptr<void> owner;
    iovec where{};  // what was left of it: nothing if it was written
  };
  // All lent parts. Whoever has them keeps their owners alive.
  std::vector<Lent> lent() const;
  // Keeps `copy`, which holds the parts `lent` one after another: what is left of them is now written from `copy`.
  void keep(std::span<const Lent> lent, const Piece& copy);

 private:
  std::unique_ptr<std::byte[]> copied_;
  std::string body_;  // its own part if it is large; then it is on the heap, and a move does not change its address
  std::vector<std::shared_ptr<void>> owners_;
  std::vector<Lent> lent_;  // without where
  std::vector<iovec> parts_;
  size_t next_ = 0, left_ = 0;
};

}  // namespace muster::transport
