// Bytes that nobody should send, to a store's server over TLS: before, within and after the handshake, with and without
// the key. The server must not crash, hang or keep anything, and must go on serving others.
//
// Each round is one connection, and what is done to it depends on its number alone (TLS's own random bytes are fresh),
// so a round that fails can be run again by itself:
//
//   MUSTER_FUZZ_ROUNDS=100000 core_tests --gtest_filter='*Fuzz*'
//   MUSTER_FUZZ_SEED=77 MUSTER_FUZZ_ROUNDS=1 core_tests --gtest_filter='*Fuzz*'   # what round 77 of seed 0 sent
//   MUSTER_FUZZ_SECONDS=3600 core_tests --gtest_filter='*Fuzz*'                   # each test for an hour

#include <gtest/gtest.h>
#include <openssl/ssl.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "store/served/addresses.h"
#include "store/served/protocol.h"
#include "store/table/shared_table.h"
#include "support/dice.h"
#include "support/fuzz.h"
#include "support/sanitized.h"
#include "support/served.h"

namespace muster {
namespace {

using test::Dice;
using test::eventually;
using test::open_fds;
using test::RawClient;
using test::TlsEnd;

// `bytes`, changed in one to four places.
std::string mangled(std::string bytes, Dice& dice) {
  static constexpr char kBorders[] = {'\x00', '\x01', '\x7f', '\x80', '\xfe', '\xff'};
  for (size_t changes = 1 + dice.below(4); changes > 0; --changes) {
    const size_t at = dice.below(bytes.size() + 1), length = dice.below(std::min<size_t>(bytes.size() - at, 32) + 1);
    switch (dice.below(7)) {
      case 0:
        if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ 1 << dice.below(8));
        break;
      case 1:
        if (at < bytes.size()) bytes[at] = kBorders[dice.below(sizeof kBorders)];
        break;
      case 2:
        bytes.erase(at, length);
        break;
      case 3:
        bytes.insert(at, dice.bytes(dice.below(40)));
        break;
      case 4:
        bytes.insert(at, bytes.substr(at, length));
        break;
      case 5:
        bytes.resize(at);
        break;
      default:
        for (size_t i = 0; i < 4 && at + i < bytes.size(); ++i) bytes[at + i] = dice.one_in(2) ? '\xff' : '\x00';
    }
  }
  return bytes;
}

store::Request some_request(Dice& dice, const std::string& value) {
  store::Request request;
  request.op = static_cast<store::Op>(dice.below(static_cast<size_t>(store::kLastOp) + 1));
  for (size_t keys = dice.one_in(4) ? dice.below(5) : 1; keys > 0; --keys)
    request.keys.push_back("fuzz" + std::to_string(dice.below(20)));
  request.value = value;
  if (dice.one_in(2)) request.expected = dice.bytes(dice.below(20));
  request.number = static_cast<int64_t>(dice.number());
  request.wait_ms = dice.one_in(2) ? dice.number() : 0;
  request.client = dice.below(3);  // so that calls come again
  request.call = dice.below(50);
  request.server = dice.one_in(8) ? dice.number() : 0;
  return request;
}

// Well-formed and malformed requests, one after another.
std::string some_frames(Dice& dice) {
  std::string frames;
  for (size_t n = 1 + dice.below(4); n > 0; --n) {
    const std::string value = dice.bytes(dice.below(200));
    const auto request = some_request(dice, value);
    if (dice.one_in(2)) {  // the frame is right, and its body may not be
      const std::string body = dice.one_in(3) ? dice.bytes(dice.below(100)) : mangled(encode(request), dice);
      const auto size = static_cast<uint32_t>(body.size());
      frames.append(reinterpret_cast<const char*>(&size), sizeof size).append(body);
    } else {
      frames += dice.one_in(2) ? frame(request) : mangled(frame(request), dice);
    }
  }
  return frames;
}

// Sends it in pieces; the server may have had enough before the end.
void send_in_pieces(RawClient& client, std::string_view bytes, Dice& dice) {
  while (!bytes.empty()) {
    const size_t piece = dice.one_in(2) ? bytes.size() : 1 + dice.below(bytes.size());
    client.send_bytes(bytes.substr(0, piece));
    bytes.remove_prefix(piece);
  }
}

class StoreFuzz : public testing::Test {
 protected:
  // Nothing of TLS, or what looks like it.
  void before_the_handshake(RawClient& client, Dice& dice) {
    std::string bytes = dice.bytes(dice.below(600));
    if (dice.one_in(2)) {  // a record of TLS: type, version, length
      const size_t length = dice.one_in(4) ? dice.below(65536) : bytes.size();
      bytes.insert(0, std::string{static_cast<char>(20 + dice.below(6)), '\x03', static_cast<char>(dice.below(5)),
                                  static_cast<char>(length >> 8), static_cast<char>(length)});
    }
    send_in_pieces(client, bytes, dice);
  }

  void within_the_handshake(RawClient& client, Dice& dice) {
    TlsEnd end(dice.one_in(3) ? Secret::generate() : secret_);
    end.shake_hands();
    const std::string hello = end.to_send();
    if (dice.one_in(2)) return send_in_pieces(client, mangled(hello, dice), dice);
    client.send_bytes(hello);
    end.feed(client.read_some());
    end.shake_hands();
    send_in_pieces(client, mangled(end.to_send() + (dice.one_in(2) ? dice.bytes(dice.below(100)) : ""), dice), dice);
  }

  // With the right key: records that are not as TLS has them, and messages of TLS's own.
  void within_the_records(Dice& dice) {
    RawClient client(server_->address(), secret_);
    for (size_t n = dice.below(4); n > 0; --n) {
      switch (dice.below(3)) {
        case 0:
          ::SSL_key_update(client.tls().get(),
                           dice.one_in(2) ? SSL_KEY_UPDATE_REQUESTED : SSL_KEY_UPDATE_NOT_REQUESTED);
          break;
        case 1:
          client.tls().write(some_frames(dice));
          break;
        default:
          ::SSL_shutdown(client.tls().get());
      }
    }
    const std::string records = client.tls().to_send();
    send_in_pieces(client, dice.one_in(2) ? mangled(records, dice) : records, dice);
    end(client, dice);
  }

  // With the right key: frames that are not as the store has them.
  void within_the_frames(Dice& dice) {
    RawClient client(server_->address(), secret_);
    const std::string frames = some_frames(dice);
    client.tls().write(std::string_view(frames).substr(0, dice.one_in(3) ? dice.below(frames.size()) : frames.size()));
    send_in_pieces(client, client.tls().to_send(), dice);
    end(client, dice);
  }

  // Goes away immediately, with unread bytes and all, or says that it is done and waits for the server to close.
  static void end(RawClient& client, Dice& dice) {
    if (dice.one_in(3)) return;
    client.no_more();
    client.read_all();
  }

  void round(Dice& dice) {
    const size_t stage = dice.below(8);
    if (stage >= 5) return within_the_frames(dice);
    if (stage >= 3) return within_the_records(dice);
    RawClient client(server_->address());
    stage == 0 ? before_the_handshake(client, dice) : within_the_handshake(client, dice);
    end(client, dice);
  }

  void expect_it_serves(int64_t round) {
    client_->set("round", std::to_string(round));
    ASSERT_EQ(client_->get("round", test::patience()), std::to_string(round));
  }

  const Secret secret_ = Secret::generate();
  const std::shared_ptr<store::SharedTable> table_ = std::make_shared<store::SharedTable>();
  const std::unique_ptr<StoreServer> server_ = store::serve_table("tls://127.0.0.1:0", table_, secret_);
  const std::shared_ptr<Store> client_ = connect_store(server_->address(), test::patience(), secret_);
};

TEST_F(StoreFuzz, TheServerSurvivesAnyBytes) {
  expect_it_serves(-1);
  const size_t before = open_fds();
  testing::internal::CaptureStderr();  // a line for each frame that is none
  test::repeat(test::kSanitized ? 300 : 1500, [&](uint64_t i) {
    Dice dice(i);
    round(dice);
    if (i % 16 == 0) expect_it_serves(static_cast<int64_t>(i));
  });
  testing::internal::GetCapturedStderr();
  expect_it_serves(-2);
  EXPECT_TRUE(eventually([&] { return table_->num_waiting() == 0; })) << table_->num_waiting() << " wait for ever";
  EXPECT_TRUE(eventually([&] { return open_fds() == before; })) << open_fds() << " descriptors, before " << before;
}

TEST(ProtocolFuzz, AnyBytesAreAMessageOrCorrupt) {
  int64_t corrupt = 0;
  const int64_t rounds = test::repeat(test::kSanitized ? 6000 : 30'000, [&](uint64_t i) {
    Dice dice(i);
    const std::string value = dice.bytes(dice.below(50));
    store::Reply reply = store::error_reply(TimeoutError(value));
    if (dice.one_in(2)) reply.value = value;
    const std::string request = mangled(encode(some_request(dice, value)), dice), answer = mangled(encode(reply), dice);
    try {
      const auto decoded = store::decode_request(request);
      EXPECT_LE(decoded.value.size(), request.size());
      store::decode_reply(answer);
    } catch (const CorruptError&) {
      ++corrupt;
    }
  });
  if (rounds < 100) return;  // somebody runs one round again
  EXPECT_GT(corrupt, rounds / 4);
  EXPECT_LT(corrupt, rounds);  // some mutants are messages, too
}

}  // namespace
}  // namespace muster
