// Feeds packets that nobody should send to the code that puts the ucx transport's packets together. That code must
// return the messages that were sent, in their order, or say that they are broken. It must not read beyond the bytes,
// nor fetch anything above the limits.
//
//   MUSTER_FUZZ_ROUNDS=1000000 transport_tests --gtest_filter='UcxFuzz.*'
//   MUSTER_FUZZ_SEED=77 MUSTER_FUZZ_ROUNDS=1 transport_tests --gtest_filter='UcxFuzz.*'   # round 77 of seed 0
//   MUSTER_FUZZ_SECONDS=3600 transport_tests --gtest_filter='UcxFuzz.*'                   # for an hour

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "muster/base/error.h"
#include "support/dice.h"
#include "support/fuzz.h"
#include "support/sanitized.h"
#include "transport/ucx/inflow.h"
#include "transport/ucx/packet.h"

namespace muster::test {
namespace {

using transport::Limits;
using transport::Message;
using transport::ucx::Header;
using transport::ucx::Inflow;
using transport::ucx::Kind;

struct Packet {
  std::string header, data;
  bool offered = false;
};

struct Said {
  std::string body;
  std::vector<std::string> pieces;
  bool goodbye = false;
  friend bool operator==(const Said&, const Said&) = default;
};

// Offers lie in it until they are fetched or refused, once.
class Shelf final : public transport::ucx::Fabric {
 public:
  explicit Shelf(Dice& dice) : dice_(dice) {}

  transport::ucx::Offer* put(const std::string& data) {
    offers_[++last_] = data;
    return reinterpret_cast<transport::ucx::Offer*>(last_);
  }
  // Ends fetches that were left under way.
  void finish() {
    for (auto* transfer : std::exchange(pending_, {})) transfer->on_done(dice_.one_in(100) ? "lost" : nullptr);
  }
  bool is_empty() const { return offers_.empty(); }
  size_t most_fetched() const { return most_fetched_; }

  const char* fetch(transport::ucx::Offer* offer, std::span<std::byte> into, transport::ucx::Transfer& transfer,
                    transport::ucx::State& state) override {
    const std::string data = take(offer);
    EXPECT_EQ(data.size(), into.size());
    most_fetched_ = std::max(most_fetched_, data.size());
    std::memcpy(into.data(), data.data(), std::min(data.size(), into.size()));
    if (dice_.one_in(2)) {
      state = transport::ucx::State::kDone;
    } else {
      state = transport::ucx::State::kUnderWay;
      pending_.push_back(&transfer);
    }
    return nullptr;
  }
  void refuse(transport::ucx::Offer* offer) override { take(offer); }

  std::string address() const override { return {}; }
  const char* connect(int, const std::string&) override { return nullptr; }
  void disconnect(int) override {}
  const char* send(int, std::span<const std::byte>, std::span<const std::byte>, bool, transport::ucx::Transfer&,
                   transport::ucx::State&) override {
    return "nothing is sent";
  }
  const char* flush(transport::ucx::Transfer&, transport::ucx::State&) override { return "nothing is sent"; }
  bool progress() override { return false; }
  int event_fd() const override { return -1; }
  bool arm() override { return true; }
  std::string version() const override { return {}; }

 private:
  std::string take(transport::ucx::Offer* offer) {
    const auto found = offers_.find(reinterpret_cast<uint64_t>(offer));
    EXPECT_NE(found, offers_.end()) << "an offer is fetched or refused twice";
    if (found == offers_.end()) return {};
    std::string data = std::move(found->second);
    offers_.erase(found);
    return data;
  }

  Dice& dice_;
  uint64_t last_ = 0;
  std::map<uint64_t, std::string> offers_;
  std::vector<transport::ucx::Transfer*> pending_;
  size_t most_fetched_ = 0;
};

Limits some_limits() { return {.body = 3 << 20, .pieces = 16, .bytes = 16 << 20}; }

size_t some_message_size(Dice& dice) {
  if (dice.one_in(200)) return dice.below(5) * transport::ucx::kChunk / 2 + dice.below(3);
  const size_t edges[] = {
      0, 1, transport::ucx::kSmall, transport::ucx::kSmall + 1, transport::ucx::kOffered, transport::ucx::kOffered + 1};
  return dice.one_in(4) ? edges[dice.below(6)] : dice.below(size_t{1} << dice.below(dice.one_in(10) ? 17 : 12));
}

Said some_message(Dice& dice) {
  Said said;
  said.body = dice.bytes(some_message_size(dice));
  for (size_t n = dice.one_in(2) ? dice.below(6) : 0; n > 0; --n)
    said.pieces.push_back(dice.bytes(some_message_size(dice)));
  return said;
}

std::string bytes_of(const Header& header) { return {reinterpret_cast<const char*>(&header), sizeof header}; }

// Its packets, as Outflow makes them.
void write(Said said, uint64_t number, std::vector<Packet>& packets) {
  Header header;
  header.number = number;
  if (said.goodbye) {
    header.kind = Kind::kGoodbye;
    packets.push_back({bytes_of(header), "", false});
    return;
  }
  Message message{said.body, {}};
  for (std::string& piece : said.pieces)
    message.pieces.push_back({reinterpret_cast<std::byte*>(piece.data()), piece.size(), nullptr, false});
  auto frame = transport::ucx::pack(message);
  header.kind = Kind::kFrame;
  header.count = frame.count;
  header.body = frame.body;
  header.total = frame.total;
  const auto write_chunks = [&packets](Header head, const std::string& data) {
    size_t at = 0;
    do {
      head.size = data.size();
      head.offset = at;
      const std::string chunk = data.substr(at, transport::ucx::kChunk);
      packets.push_back({bytes_of(head), chunk, chunk.size() > transport::ucx::kOffered});
      at += transport::ucx::kChunk;
    } while (at < data.size());
  };
  write_chunks(header, frame.data);
  for (const uint32_t i : frame.large) {
    header = {};
    header.kind = Kind::kPiece;
    header.number = number;
    header.count = i;
    write_chunks(header, said.pieces[i]);
  }
}

void shuffle(std::vector<Packet>& packets, Dice& dice) {
  for (size_t i = packets.size(); i > 1; --i) std::swap(packets[i - 1], packets[dice.below(i)]);
}

void mutate(std::string& bytes, Dice& dice) {
  if (bytes.empty() || dice.one_in(8)) {
    bytes += dice.bytes(1 + dice.below(20));
    return;
  }
  const size_t at = dice.below(dice.one_in(2) ? std::min<size_t>(bytes.size(), 64) : bytes.size());
  switch (dice.below(4)) {
    case 0:
      bytes[at] = static_cast<char>(bytes[at] ^ 1 << dice.below(8));
      break;
    case 1:
      bytes.erase(at, 1 + dice.below(20));
      break;
    default:
      for (size_t i = at; i < std::min(at + 8, bytes.size()); ++i) bytes[i] = dice.one_in(2) ? '\xff' : '\x00';
  }
}

void take_all(Inflow& flow, std::vector<Said>& got) {
  while (auto taken = flow.take()) {
    Said said{std::string(taken->body), {}, taken->goodbye};
    for (const auto& piece : taken->pieces) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(piece.data) % 64, 0U);
      EXPECT_TRUE(piece.owner);
      said.pieces.emplace_back(reinterpret_cast<const char*>(piece.data), piece.bytes);
      std::memset(piece.data, 7, piece.bytes);  // the receiver's to write; a sanitizer sees what is not there
    }
    got.push_back(std::move(said));
  }
}

// Whether all were taken for good ones.
bool feed(const std::vector<Packet>& packets, Dice& dice, std::vector<Said>& got) {
  Inflow flow(some_limits());  // before the shelf, as before a fabric
  Shelf shelf(dice);
  bool good = true;
  for (const Packet& packet : packets) {
    try {
      const std::vector<char> copy(packet.header.begin(), packet.header.end());  // a sanitizer sees reads past its end
      const Header header = Header::parse(std::as_bytes(std::span(copy)));
      if (header.kind != Kind::kFrame && header.kind != Kind::kPiece && header.kind != Kind::kGoodbye) continue;
      if (packet.offered) {
        flow.on_offer(header, packet.data.size(), shelf.put(packet.data));
      } else {
        const std::vector<char> data(packet.data.begin(), packet.data.end());
        flow.on_arrival(header, std::as_bytes(std::span(data)));
      }
    } catch (const CorruptError&) {
      good = false;
      break;
    }
    flow.fetch(shelf);
    if (dice.one_in(3)) shelf.finish();
    if (!flow.failure().empty()) break;
    take_all(flow, got);
  }
  for (int i = 0; i < 1000 && good; ++i) {
    flow.fetch(shelf);
    take_all(flow, got);
    if (!flow.is_fetching() || !flow.failure().empty()) break;
    shelf.finish();
  }
  good = good && flow.failure().empty();
  flow.close(shelf);
  shelf.finish();
  EXPECT_TRUE(shelf.is_empty()) << "an offer was neither fetched nor refused";
  EXPECT_LE(shelf.most_fetched(), some_limits().bytes + 16 * 72);
  return good;
}

TEST(UcxFuzz, WhatIsSentComesInOrderHoweverItArrives) {
  repeat(kSanitized ? 200 : 1000, [](uint64_t seed) {
    Dice dice(seed);
    std::vector<Said> said;
    std::vector<Packet> packets;
    for (size_t n = 1 + dice.below(6); n > 0; --n) said.push_back(some_message(dice));
    if (dice.one_in(2)) said.push_back({.goodbye = true});
    for (size_t i = 0; i < said.size(); ++i) write(said[i], i + 1, packets);
    if (!dice.one_in(4)) shuffle(packets, dice);
    std::vector<Said> got;
    const bool lost = !feed(packets, dice, got);  // a fetch may be in vain here and there
    ASSERT_LE(got.size(), said.size());
    EXPECT_TRUE(lost || got.size() == said.size());
    EXPECT_TRUE(std::equal(got.begin(), got.end(), said.begin()));
  });
}

TEST(UcxFuzz, MutantsAreFoundOrHarmless) {
  repeat(kSanitized ? 500 : 3000, [](uint64_t seed) {
    Dice dice(seed);
    std::vector<Packet> packets;
    for (uint64_t number = 1; number <= 3; ++number) write(some_message(dice), number, packets);
    if (dice.one_in(2)) shuffle(packets, dice);
    for (size_t changes = 1 + dice.below(3); changes > 0; --changes) {
      Packet& victim = packets[dice.below(packets.size())];
      if (dice.one_in(10)) {
        packets.push_back(victim);  // twice
      } else if (dice.one_in(10)) {
        victim.offered = !victim.offered;
      } else {
        mutate(dice.one_in(2) ? victim.header : victim.data, dice);
      }
    }
    std::vector<Said> got;
    feed(packets, dice, got);
    EXPECT_LE(got.size(), 3U);
  });
}

TEST(UcxFuzz, NoiseIsFoundOrHarmless) {
  repeat(kSanitized ? 500 : 3000, [](uint64_t seed) {
    Dice dice(seed);
    std::vector<Packet> packets;
    for (size_t n = 1 + dice.below(8); n > 0; --n) {
      Header header;
      header.kind = static_cast<Kind>(dice.below(9));
      header.number = dice.below(4);
      header.count = static_cast<uint32_t>(dice.below(dice.one_in(4) ? UINT32_MAX : 8));
      header.body = dice.below(dice.one_in(4) ? UINT64_MAX : 300);
      header.total = dice.below(dice.one_in(4) ? UINT64_MAX : 600);
      const std::string data = dice.bytes(some_message_size(dice));
      header.size = dice.one_in(2) ? data.size() : dice.below(dice.one_in(4) ? UINT64_MAX : 600);
      header.offset = dice.one_in(2) ? 0 : dice.below(4) * transport::ucx::kChunk;
      packets.push_back({bytes_of(header), data, dice.one_in(2)});
    }
    std::vector<Said> got;
    feed(packets, dice, got);
  });
}

}  // namespace
}  // namespace muster::test
