// Feeds bytes that nobody should send to the parser of frames, in portions of any size. The parser must return the
// frames that were written, or throw CorruptError. It must not read beyond the bytes, nor take much more memory than came.
//
//   MUSTER_FUZZ_ROUNDS=1000000 transport_tests --gtest_filter='FrameFuzz.*'
//   MUSTER_FUZZ_SEED=77 MUSTER_FUZZ_ROUNDS=1 transport_tests --gtest_filter='FrameFuzz.*'   # round 77 of seed 0
//   MUSTER_FUZZ_SECONDS=3600 transport_tests --gtest_filter='FrameFuzz.*'                   # for an hour

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "muster/base/deadline.h"
#include "muster/base/error.h"
#include "support/dice.h"
#include "support/fuzz.h"
#include "support/sanitized.h"
#include "transport/tcp/frame.h"

namespace muster::test {
namespace {

using transport::FrameKind;
using transport::FrameParser;
using transport::Limits;
using transport::Message;
using transport::Outgoing;

struct Frame {
  FrameKind kind = FrameKind::kMessage;
  std::string body;
  std::vector<std::string> pieces;
  friend bool operator==(const Frame&, const Frame&) = default;
};

size_t some_size(Dice& dice) { return dice.below(size_t{1} << dice.below(dice.one_in(50) ? 20 : 12)); }

Frame some_frame(Dice& dice) {
  Frame frame;
  if (dice.one_in(5)) {
    frame.kind = dice.one_in(2) ? FrameKind::kHeartbeat : FrameKind::kGoodbye;
    return frame;
  }
  if (!dice.one_in(4)) frame.body = dice.bytes(some_size(dice));
  for (size_t n = dice.one_in(2) ? dice.below(5) : 0; n > 0; --n)
    frame.pieces.push_back(dice.bytes(dice.one_in(4) ? 0 : some_size(dice)));
  return frame;
}

// What Outgoing writes for it, taken in steps.
std::string written(Frame& frame, Dice& dice) {
  Message message{frame.body, {}};
  for (std::string& piece : frame.pieces)
    message.pieces.push_back({reinterpret_cast<std::byte*>(piece.data()), piece.size(), nullptr, false});
  Outgoing out = frame.kind == FrameKind::kMessage ? Outgoing(std::move(message)) : Outgoing(frame.kind);
  std::string bytes;
  while (out.bytes() > 0) {
    size_t step = dice.one_in(2) ? out.bytes() : 1 + dice.below(out.bytes()), left = step;
    for (const iovec& part : out.rest()) {
      const size_t n = std::min(part.iov_len, left);
      bytes.append(static_cast<const char*>(part.iov_base), n);
      left -= n;
    }
    EXPECT_EQ(left, 0U);
    out.taken(step);
  }
  EXPECT_TRUE(out.rest().empty());
  return bytes;
}

Frame frame_of(FrameParser& parser) {
  Frame frame{parser.kind(), std::string(parser.body()), {}};
  for (const auto& piece : parser.pieces()) {
    EXPECT_TRUE(piece.owner);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(piece.data) % 64, 0U);
    frame.pieces.emplace_back(reinterpret_cast<const char*>(piece.data), piece.bytes);
  }
  return frame;
}

// Feeds `bytes` in portions, some of them into room(). False: CorruptError.
bool parse(FrameParser& parser, std::string_view bytes, Dice& dice, std::vector<Frame>* frames) {
  try {
    while (!bytes.empty()) {
      size_t portion = dice.one_in(3) ? bytes.size() : 1 + dice.below(dice.one_in(2) ? 10 : bytes.size());
      portion = std::min(portion, bytes.size());
      // A copy of its own, so that a sanitizer sees a read past its end.
      const std::vector<char> some(bytes.begin(), bytes.begin() + static_cast<long>(portion));
      bytes.remove_prefix(portion);
      std::span<const std::byte> rest = std::as_bytes(std::span(some));
      while (!rest.empty()) {
        bool whole = false;
        if (const auto room = parser.room(); !room.empty() && dice.one_in(2)) {
          const size_t n = std::min(room.size(), rest.size());
          std::memcpy(room.data(), rest.data(), n);
          rest = rest.subspan(n);
          whole = parser.filled(n);
        } else {
          whole = parser.take(rest);
        }
        if (whole) frames->push_back(frame_of(parser));
      }
    }
    return true;
  } catch (const CorruptError&) {
    return false;
  }
}

TEST(FrameFuzz, WhatIsWrittenIsReadInWhateverPortions) {
  repeat(kSanitized ? 500 : 3000, [](uint64_t number) {
    Dice dice(number);
    std::vector<Frame> frames(1 + dice.below(6)), read;
    std::string bytes;
    for (Frame& frame : frames) bytes += written(frame = some_frame(dice), dice);
    FrameParser parser{Limits{}};
    ASSERT_TRUE(parse(parser, bytes, dice, &read));
    EXPECT_EQ(frames.size(), read.size());
    EXPECT_TRUE(frames == read);
  });
}

TEST(FrameFuzz, AnyBytesAreFramesOrCorrupt) {
  Limits limits;
  limits.body = 1 << 18;
  limits.pieces = 100;
  limits.bytes = 1 << 24;
  int64_t corrupt = 0;
  const int64_t rounds = repeat(kSanitized ? 2000 : 20'000, [&](uint64_t number) {
    Dice dice(number);
    std::string bytes;
    for (size_t n = 1 + dice.below(4); n > 0; --n) {
      Frame frame = some_frame(dice);
      bytes += dice.one_in(3) ? dice.bytes(dice.below(60)) : mutated(written(frame, dice), dice);
    }
    FrameParser parser(limits);
    std::vector<Frame> read;
    corrupt += !parse(parser, bytes, dice, &read);
    size_t total = 0;
    for (const Frame& frame : read) {
      total += transport::kFrameHeader + frame.body.size();
      EXPECT_LE(frame.body.size(), limits.body);
      EXPECT_LE(frame.pieces.size(), limits.pieces);
      for (const auto& piece : frame.pieces) total += piece.size() + sizeof(uint64_t);
    }
    EXPECT_LE(total, bytes.size());  // nothing comes of nothing
  });
  if (rounds < 1000) return;
  EXPECT_GT(corrupt, rounds / 4);
  EXPECT_LT(corrupt, rounds);  // some mutants are frames, too
}

}  // namespace
}  // namespace muster::test
