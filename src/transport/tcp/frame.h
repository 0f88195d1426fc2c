// Frames: how messages lie on a connection.
//
//   header    16 bytes, little-endian: kind u8, zero u8[3], pieces u32, body bytes u64
//   table     a u64 for each piece: its bytes
//   body
//   pieces    one after another
//
// Only messages have more than a header; heartbeats and the good-bye are headers alone. The table stands before the
// body so that all that a frame will take is known, and held against the limits, before memory is taken for any of it.
// And then memory is taken only as bytes come: a frame that claims gigabytes and sends nothing costs nothing.
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

  // Takes from the front of `bytes` up to the end of a frame. Returns whether one is whole: its kind, body and pieces
  // are then there until the next call. Corrupt where it is no frame or breaks the limits; nothing can be read after
  // it.
  bool take(std::span<const std::byte>& bytes);

  // Where the next bytes may be put instead of being handed to take(); empty unless a piece is under way.
  std::span<std::byte> room();
  // That the first `bytes` of room() have been filled; returns as take() does.
  bool filled(size_t bytes);

  FrameKind kind() const { return kind_; }
  std::string_view body() const { return body_; }
  std::vector<Piece>& pieces() { return pieces_; }

 private:
  enum class Part { kHeader, kTable, kBody, kPieces };

  void begin();
  bool collect(std::span<const std::byte>& bytes, size_t size);  // into head_; whether it holds `size` bytes
  void parse_header();
  void parse_size();
  bool next_piece();  // whether there was none left, so that the frame is whole

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

// A frame on its way out. What is small is copied into one block behind the header; what is large is written from where
// it lies, and held until then. Of that, what its sender may write to again is lent, until it is copied.
class Outgoing {
 public:
  explicit Outgoing(FrameKind kind);
  explicit Outgoing(Message message);
  Outgoing(Outgoing&&) noexcept = default;
  Outgoing& operator=(Outgoing&&) noexcept = default;

  // What is left of it, in order. The list is valid until taken(); what it points to, until the frame's end.
  std::span<const iovec> rest() const { return std::span(parts_).subspan(next_); }
  size_t bytes() const { return left_; }
  // That the first `bytes` of it are written: at most all that is left.
  void taken(size_t bytes);

  struct Lent {
    size_t part = 0;  // which
    std::shared_ptr<void> owner;
    iovec where{};  // what was left of it
  };
  // What is lent of what is left.
  std::vector<Lent> lent() const;
  // Keeps `copy`, which has what was lent then, one after another: what is left of that is written from there.
  void keep(std::span<const Lent> lent, const Piece& copy);

 private:
  std::unique_ptr<std::byte[]> copied_;
  std::string body_;  // a part of its own where it is large, and so on the heap, which a move does not change
  std::vector<std::shared_ptr<void>> owners_;
  std::vector<Lent> lent_;  // without where
  std::vector<iovec> parts_;
  size_t next_ = 0, left_ = 0;
};

}  // namespace muster::transport
