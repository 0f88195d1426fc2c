#include "transport/tcp/frame.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/copy.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::transport {
namespace {

constexpr size_t kCopied = 4096;       // a part of at most this size is copied into the block behind the header
constexpr size_t kFirstBody = 65'536;  // memory that a body gets before its bytes have come

template <typename T>
T number_at(const char* at) {
  T number;
  std::memcpy(&number, at, sizeof number);
  return number;
}

iovec part(const void* data, size_t bytes) { return {const_cast<void*>(data), bytes}; }

}  // namespace

void FrameParser::begin() {
  whole_ = false;
  part_ = Part::kHeader;
  head_.clear();
  body_.clear();
  if (body_.capacity() > kFirstBody) body_.shrink_to_fit();  // one large body must not stay for ever
  pieces_.clear();
  sizes_.clear();
  body_bytes_ = total_ = num_pieces_ = filled_ = 0;
}

bool FrameParser::collect(std::span<const std::byte>& bytes, size_t size) {
  const size_t n = std::min(size - head_.size(), bytes.size());
  head_.append(reinterpret_cast<const char*>(bytes.data()), n);
  bytes = bytes.subspan(n);
  return head_.size() == size;
}

void FrameParser::parse_header() {
  const auto kind = number_at<uint8_t>(head_.data());
  const auto pieces = number_at<uint32_t>(head_.data() + 4);
  const auto body = number_at<uint64_t>(head_.data() + 8);
  if (kind < 1 || kind > 3 || head_[1] != 0 || head_[2] != 0 || head_[3] != 0)
    throw CorruptError(text("a frame of unknown kind ", int{kind}));
  kind_ = static_cast<FrameKind>(kind);
  if (kind_ != FrameKind::kMessage && (pieces != 0 || body != 0))
    throw CorruptError("a heartbeat or good-bye with contents");
  if (pieces > limits_.pieces)
    throw CorruptError(text("a message of ", pieces, " pieces; at most ", limits_.pieces, " are allowed"));
  const size_t most = std::min(limits_.body, limits_.bytes);
  if (body > most)
    throw CorruptError(text("a message with a body of ", body, " bytes; at most ", most, " are allowed"));
  body_bytes_ = total_ = body;
  num_pieces_ = pieces;
  head_.clear();
  part_ = Part::kTable;
}

void FrameParser::parse_size() {
  const auto size = number_at<uint64_t>(head_.data());
  if (size > limits_.bytes - total_)  // total_ is within the limit at every step, so nothing wraps around
    throw CorruptError(text("a message of more than the ", limits_.bytes, " bytes that are allowed"));
  total_ += size;
  sizes_.push_back(size);
  head_.clear();
}

bool FrameParser::next_piece() {
  while (pieces_.size() < num_pieces_) {
    const size_t size = sizes_[pieces_.size()];
    pieces_.push_back(make_piece(size));
    filled_ = 0;
    if (size > 0) return false;
  }
  whole_ = true;
  return true;
}

bool FrameParser::take(std::span<const std::byte>& bytes) {
  if (whole_) begin();
  for (;;) {
    switch (part_) {
      case Part::kHeader:
        if (!collect(bytes, kFrameHeader)) return false;
        parse_header();
        break;
      case Part::kTable:
        if (sizes_.size() < num_pieces_) {
          if (!collect(bytes, sizeof(uint64_t))) return false;
          parse_size();
          break;
        }
        body_.reserve(std::min(body_bytes_, kFirstBody));  // grows with what comes
        part_ = Part::kBody;
        break;
      case Part::kBody: {
        const size_t n = std::min(body_bytes_ - body_.size(), bytes.size());
        body_.append(reinterpret_cast<const char*>(bytes.data()), n);
        bytes = bytes.subspan(n);
        if (body_.size() < body_bytes_) return false;
        part_ = Part::kPieces;
        if (next_piece()) return true;
        break;
      }
      case Part::kPieces: {
        const auto to = room();
        const size_t n = std::min(to.size(), bytes.size());
        if (n == 0) return false;
        copy_bytes(to.data(), bytes.data(), n);
        bytes = bytes.subspan(n);
        if (filled(n)) return true;
        break;
      }
    }
  }
}

std::span<std::byte> FrameParser::room() {
  if (whole_ || part_ != Part::kPieces || pieces_.empty()) return {};
  const Piece& piece = pieces_.back();
  return {piece.data + filled_, piece.bytes - filled_};
}

bool FrameParser::filled(size_t bytes) {
  filled_ += bytes;
  return filled_ == pieces_.back().bytes && next_piece();
}

Outgoing::Outgoing(FrameKind kind) : copied_(std::make_unique<std::byte[]>(kFrameHeader)) {
  const auto number = static_cast<uint8_t>(kind);
  std::memcpy(copied_.get(), &number, sizeof number);
  parts_.push_back(part(copied_.get(), kFrameHeader));
  left_ = kFrameHeader;
}

Outgoing::Outgoing(Message message) : body_(std::move(message.body)) {
  const size_t table = message.pieces.size() * sizeof(uint64_t), body = body_.size();
  size_t block = kFrameHeader + table + (body <= kCopied ? body : 0);
  for (const Piece& piece : message.pieces) block += piece.bytes <= kCopied ? piece.bytes : 0;
  copied_ = std::make_unique_for_overwrite<std::byte[]>(block);

  std::byte* at = copied_.get();
  std::byte* run = at;  // start of what was copied since the last part that was not copied
  const auto copy = [&](const void* from, size_t bytes) {
    copy_bytes(at, from, bytes);
    at += bytes;
  };
  const auto end_run = [&] {
    if (at != run) parts_.push_back(part(run, static_cast<size_t>(at - run)));
    run = at;
  };
  const auto put = [&](const void* from, size_t bytes) {
    if (bytes <= kCopied) return copy(from, bytes);
    end_run();
    parts_.push_back(part(from, bytes));
  };

  struct {
    uint8_t kind = static_cast<uint8_t>(FrameKind::kMessage);
    uint8_t zero[3] = {};
    uint32_t pieces = 0;
    uint64_t body = 0;
  } header;
  static_assert(sizeof header == kFrameHeader);
  header.pieces = static_cast<uint32_t>(message.pieces.size());
  header.body = body;
  copy(&header, sizeof header);
  for (const Piece& piece : message.pieces) {
    const uint64_t size = piece.bytes;
    copy(&size, sizeof size);
  }
  put(body_.data(), body);
  for (Piece& piece : message.pieces) {
    put(piece.data, piece.bytes);
    if (piece.bytes <= kCopied) continue;
    if (!piece.unique) {
      lent_.push_back({parts_.size() - 1, std::move(piece.owner)});
    } else if (piece.owner) {
      owners_.push_back(std::move(piece.owner));
    }
  }
  end_run();
  for (const iovec& one : parts_) left_ += one.iov_len;
}

void Outgoing::taken(size_t bytes) {
  left_ -= bytes;
  while (bytes > 0) {
    iovec& first = parts_[next_];
    const size_t n = std::min(bytes, first.iov_len);
    first.iov_base = static_cast<char*>(first.iov_base) + n;
    first.iov_len -= n;
    bytes -= n;
    if (first.iov_len == 0) ++next_;
  }
}

std::vector<Outgoing::Lent> Outgoing::lent() const {
  std::vector<Lent> all;
  for (const Lent& one : lent_) all.push_back({one.part, one.owner, parts_[one.part]});
  return all;
}

void Outgoing::keep(std::span<const Lent> lent, const Piece& copy) {
  std::byte* at = copy.data;
  for (const Lent& one : lent) {
    iovec& part = parts_[one.part];
    part.iov_base = at + (one.where.iov_len - part.iov_len);  // some of it may have been written meanwhile
    at += one.where.iov_len;
  }
  lent_.clear();
  owners_.push_back(copy.owner);
}

}  // namespace muster::transport
