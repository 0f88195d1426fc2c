#include "transport/ucx/packet.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/random.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "transport/piece.h"

namespace muster::transport::ucx {
namespace {

constexpr std::string_view kEntryMagic = "muster-ucx", kEntryVersion = "1";
constexpr size_t kMostAddress = 64 << 10;

size_t aligned(size_t bytes) { return (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment; }

bool from_hex(std::string_view hex, std::span<unsigned char> bytes) {
  if (hex.size() != 2 * bytes.size()) return false;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const char* at = hex.data() + 2 * i;
    if (std::from_chars(at, at + 2, bytes[i], 16).ptr != at + 2) return false;
  }
  return true;
}

}  // namespace

Key make_key() {
  Key key{};
  random_bytes(key);
  return key;
}

Header Header::parse(std::span<const std::byte> bytes) {
  Header header;
  if (bytes.size() != sizeof header) throw CorruptError("a packet with a header of another size");
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != kMagic || header.zero[0] || header.zero[1] || header.zero[2])
    throw CorruptError("a packet without a header of this version");
  if (header.kind < Kind::kHello || header.kind > Kind::kGone)
    throw CorruptError(text("a packet of unknown kind ", static_cast<int>(header.kind)));
  return header;
}

Frame pack(Message& message) {
  Frame frame;
  frame.body = message.body.size();
  frame.total = message.bytes();
  frame.count = static_cast<uint32_t>(message.pieces.size());
  if (message.pieces.empty()) {
    frame.data = std::move(message.body);
    return frame;
  }
  size_t bytes = message.pieces.size() * sizeof(uint64_t) + message.body.size();
  for (const Piece& piece : message.pieces)
    if (piece.bytes > 0 && piece.bytes <= kSmall) bytes = aligned(bytes) + piece.bytes;
  std::string& data = frame.data;
  data.reserve(bytes);
  for (const Piece& piece : message.pieces) {
    const uint64_t size = piece.bytes;
    data.append(reinterpret_cast<const char*>(&size), sizeof size);
  }
  data.append(message.body);
  message.body.clear();
  for (uint32_t i = 0; i < frame.count; ++i) {
    Piece& piece = message.pieces[i];
    if (piece.bytes > kSmall) {
      frame.large.push_back(i);
      if (!piece.unique) piece = copy_of({piece.data, piece.bytes});
    } else if (piece.bytes > 0) {
      data.resize(aligned(data.size()));
      data.append(reinterpret_cast<const char*>(piece.data), piece.bytes);
    }
  }
  return frame;
}

size_t most_bytes(const Header& header, const Limits& limits) {
  if (header.count > limits.pieces)
    throw CorruptError(text("a message of ", header.count, " pieces; at most ", limits.pieces, " are allowed"));
  if (header.total > limits.bytes || header.body > std::min<uint64_t>(limits.body, header.total))
    throw CorruptError(text("a message of ", header.total, " bytes with a body of ", header.body, "; at most ",
                            limits.bytes, " and ", limits.body, " are allowed"));
  if (header.count == 0) return header.body;
  const size_t small = std::min<uint64_t>(header.total - header.body, header.count * kSmall);
  return header.count * (sizeof(uint64_t) + kPieceAlignment) + header.body + small;
}

Unpacked unpack(const Header& header, const Piece& block, const Limits& limits) {
  const size_t table = size_t{header.count} * sizeof(uint64_t);
  if (block.bytes > most_bytes(header, limits) || block.bytes < table + header.body)
    throw CorruptError("a frame of another length than its header says");
  Unpacked frame;
  frame.body = {reinterpret_cast<const char*>(block.data) + table, header.body};
  frame.pieces.resize(header.count);
  size_t at = table + header.body;
  uint64_t total = header.body;
  for (uint32_t i = 0; i < header.count; ++i) {
    Piece& piece = frame.pieces[i];
    uint64_t size = 0;
    std::memcpy(&size, block.data + i * sizeof size, sizeof size);
    if (size > header.total - total)  // total is at most header.total at each step: nothing wraps around
      throw CorruptError("pieces of more bytes than the header of their message says");
    total += size;
    piece.bytes = size;
    if (size == 0) {
      piece = make_piece(0);
    } else if (size <= kSmall) {
      at = aligned(at);
      if (at > block.bytes || size > block.bytes - at) throw CorruptError("a frame that is shorter than its pieces");
      piece.data = block.data + at;
      piece.owner = std::shared_ptr<void>(block.owner, piece.data);
      at += size;
    } else {
      ++frame.missing;
    }
  }
  if (total != header.total || at != block.bytes) throw CorruptError("a frame of another length than its pieces have");
  return frame;
}

std::string Entry::text() const {
  return muster::text(kEntryMagic, kEntryVersion, ' ', to_hex(key), ' ', size, ' ', pid, ' ', heartbeat_ms, ' ',
                      to_hex({reinterpret_cast<const unsigned char*>(address.data()), address.size()}));
}

Entry Entry::parse(std::string_view text) {
  PlainInput in{std::string(text)};
  std::string magic, key, address;
  Entry entry;
  in >> magic;
  if (magic.starts_with(kEntryMagic) && magic.substr(kEntryMagic.size()) != kEntryVersion)
    throw Mismatch("a worker speaks another version of the ucx transport", "Run the same version of Muster everywhere");
  in >> key >> entry.size >> entry.pid >> entry.heartbeat_ms >> address;
  if (!in || !magic.starts_with(kEntryMagic) || address.size() / 2 > kMostAddress || entry.heartbeat_ms < 1 ||
      !from_hex(key, entry.key))
    throw CorruptError("an address of UCX in the directory is none");
  entry.address.resize(address.size() / 2);
  if (!from_hex(address, {reinterpret_cast<unsigned char*>(entry.address.data()), entry.address.size()}))
    throw CorruptError("an address of UCX in the directory is none");
  return entry;
}

}  // namespace muster::transport::ucx
