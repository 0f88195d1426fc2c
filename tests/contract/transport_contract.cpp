#include "contract/transport_contract.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <sstream>

#include "base/text.h"
#include "muster/base/error.h"
#include "support/eventually.h"

namespace muster::test {

using std::chrono::milliseconds;
using std::chrono::seconds;
using transport::Limits;
using transport::Message;
using transport::Piece;

void TransportContract::open(size_t n, const Limits& limits) {
  std::vector<transport::Receiver*> receivers;
  for (size_t rank = 0; rank < n; ++rank) receivers.push_back(&receiver(rank));
  transports_ = GetParam().make(receivers, limits);
  ASSERT_EQ(transports_.size(), n);
  for (size_t rank = 0; rank < n; ++rank) {
    pumps_.push_back(std::make_unique<Pump>());
    if (!GetParam().is_driven) continue;
    pumps_[rank]->thread = std::thread([&transport = *transports_[rank], &stop = pumps_[rank]->stop] {
      while (!stop)
        if (!transport.poll()) transport.sleep(milliseconds(10));
    });
  }
}

void TransportContract::end(size_t rank) {
  if (!transports_[rank]) return;
  if (GetParam().is_driven) {
    transports_[rank]->close(in_time());
    pumps_[rank]->stop = true;
    transports_[rank]->wake();
    pumps_[rank]->thread.join();
  }
  transports_[rank].reset();
}

namespace {

// The bytes of piece number `seed`.
void fill(std::byte* data, size_t bytes, uint64_t seed) {
  std::minstd_rand random(static_cast<uint32_t>(seed * 2654435761U + 1));
  uint64_t word = random();
  for (size_t i = 0; i + sizeof word <= bytes;
       i += sizeof word, word = word * 6364136223846793005U + 1442695040888963407U)
    std::memcpy(data + i, &word, sizeof word);
  for (size_t i = bytes / sizeof word * sizeof word; i < bytes; ++i) data[i] = static_cast<std::byte>(seed + i);
}

Piece make_piece(size_t bytes, uint64_t seed, bool unique = false) {
  auto memory = std::make_shared<std::vector<std::byte>>(bytes);
  fill(memory->data(), bytes, seed);
  Piece piece;
  piece.data = memory->data();
  piece.bytes = bytes;
  piece.owner = memory;
  piece.unique = unique;
  return piece;
}

bool is_whole(const Piece& piece, uint64_t seed) {
  std::vector<std::byte> wanted(piece.bytes);
  fill(wanted.data(), wanted.size(), seed);
  return piece.bytes == 0 || std::memcmp(piece.data, wanted.data(), piece.bytes) == 0;
}

Message say(std::string body, std::vector<Piece> pieces = {}) { return {std::move(body), std::move(pieces)}; }

// A message whose body describes its pieces: "stream number size… padding".
Message telling(int stream, int number, std::mt19937& random) {
  std::string body = text(stream, " ", number);
  std::vector<Piece> pieces;
  const size_t kinds[] = {0, 0, 1, 1, 2, 7};
  const size_t count = kinds[random() % 6];
  for (size_t i = 0; i < count; ++i) {
    const size_t scale = random() % 24;
    const size_t size = scale == 0 ? 0 : random() % ((size_t{1} << std::min<size_t>(scale, kSanitized ? 18 : 22)) + 1);
    body += text(" ", size);
    pieces.push_back(make_piece(size, static_cast<uint64_t>(stream * 1'000'003 + number * 101) + i, random() % 2));
  }
  body += " .";
  if (random() % 8 == 0) body.append(random() % (1 << (random() % 21)), 'p');
  return say(std::move(body), std::move(pieces));
}

// Checks such a message; returns {stream, number}.
std::pair<int, int> told(std::string_view body, const std::vector<Piece>& pieces) {
  std::istringstream in{std::string(body)};
  int stream = -1, number = -1;
  in >> stream >> number;
  std::vector<size_t> sizes;
  for (size_t size = 0; in >> size;) sizes.push_back(size);
  EXPECT_EQ(sizes.size(), pieces.size());
  for (size_t i = 0; i < std::min(sizes.size(), pieces.size()); ++i) {
    EXPECT_EQ(pieces[i].bytes, sizes[i]);
    EXPECT_TRUE(is_whole(pieces[i], static_cast<uint64_t>(stream * 1'000'003 + number * 101) + i));
  }
  return {stream, number};
}

std::string cause_of_sending(transport::Transport& transport, int peer) {
  try {
    for (const auto deadline = in_time(); !deadline.passed();) transport.send(peer, say("?"));
  } catch (const PeerLost& error) {
    EXPECT_EQ(error.rank(), peer);
    return error.message();
  }
  return "no error";
}

TEST_P(TransportContract, EveryMessageComesOnceWholeAndInOrder) {
  constexpr int kStreams = 3;
  const int messages = kSanitized ? 60 : 300;
  std::atomic<int> came[2] = {0, 0};
  std::vector<int> next[2];  // by stream; only that receiver's thread uses it
  for (int rank = 0; rank < 2; ++rank) {
    next[rank].assign(kStreams, 0);
    receiver(static_cast<size_t>(rank)).on = [&, rank](int peer, std::string_view body, std::vector<Piece>& pieces) {
      EXPECT_EQ(peer, 1 - rank);
      const auto [stream, number] = told(body, pieces);
      ASSERT_TRUE(stream >= 0 && stream < kStreams);
      EXPECT_EQ(number, next[rank][static_cast<size_t>(stream)]++);
      ++came[rank];
    };
  }
  open(2);
  std::vector<std::thread> senders;
  for (int rank = 0; rank < 2; ++rank)
    for (int stream = 0; stream < kStreams; ++stream)
      senders.emplace_back([&, rank, stream] {
        std::mt19937 random(static_cast<uint32_t>(rank * 10 + stream));
        for (int i = 0; i < messages; ++i) {
          at(static_cast<size_t>(rank)).send(1 - rank, telling(stream, i, random));
          at(static_cast<size_t>(rank)).wait_below(1 - rank, size_t{32} << 20, in_time());
        }
      });
  for (auto& sender : senders) sender.join();
  EXPECT_TRUE(eventually([&] { return came[0] == kStreams * messages && came[1] == kStreams * messages; }))
      << came[0] << " and " << came[1];
}

TEST_P(TransportContract, EveryShapeComesAsItWent) {
  open(2);
  std::vector<std::vector<size_t>> shapes = {{},
                                             {0},
                                             {0, 0, 0},
                                             {1},
                                             {0, 5, 0},
                                             {4095, 4096, 4097},
                                             {65'536, 1},
                                             {3, 200'000, 0, 70'000},
                                             std::vector<size_t>(3000, 17),
                                             std::vector<size_t>(40, 40'000),
                                             {size_t{33} << 20}};
  size_t sent = 0;
  for (const auto& sizes : shapes)
    for (const size_t body : {size_t{0}, size_t{1}, size_t{5000}, size_t{300'000}}) {
      std::vector<Piece> pieces;
      for (size_t i = 0; i < sizes.size(); ++i) pieces.push_back(make_piece(sizes[i], i));
      at(0).send(1, say(std::string(body, static_cast<char>('a' + sent % 26)), std::move(pieces)));
      ++sent;
    }
  const auto got = receiver(1).take(sent);
  ASSERT_EQ(got.size(), sent);
  size_t n = 0;
  for (const auto& sizes : shapes)
    for (const size_t body : {size_t{0}, size_t{1}, size_t{5000}, size_t{300'000}}) {
      EXPECT_EQ(got[n].body, std::string(body, static_cast<char>('a' + n % 26)));
      ASSERT_EQ(got[n].pieces.size(), sizes.size());
      for (size_t i = 0; i < sizes.size(); ++i) {
        EXPECT_EQ(got[n].pieces[i].bytes, sizes[i]);
        EXPECT_TRUE(is_whole(got[n].pieces[i], i)) << "piece " << i << " of message " << n;
      }
      ++n;
    }
}

// As when a tensor's memory belongs to an object whose destructor calls another worker.
TEST_P(TransportContract, WhatOwnsAPieceMaySendWhenItEnds) {
  open(2);
  const auto piece_that_sends = [this](size_t size, bool unique) {
    Piece piece = make_piece(size, size, unique);
    piece.owner = std::shared_ptr<void>(
        piece.data, [this, kept = std::move(piece.owner)](void*) { at(0).send(1, say("the owner's end")); });
    return piece;
  };
  // Of the last one, the first piece is written immediately, and the second is not.
  for (const auto& sizes : std::vector<std::vector<size_t>>{{10}, {100'000}, {5'000'000}, {100'000, 5'000'000}})
    for (const bool unique : {false, true}) {
      std::vector<Piece> pieces;
      for (const size_t size : sizes) pieces.push_back(piece_that_sends(size, unique));
      at(0).send(1, say("pieces", std::move(pieces)));
      size_t ends = 0;
      for (const auto& got : receiver(1).take(1 + sizes.size())) ends += got.body == "the owner's end";
      EXPECT_EQ(ends, sizes.size());
    }
}

TEST_P(TransportContract, OwnersAreLetGoOnceWritten) {
  open(2);
  std::vector<std::weak_ptr<void>> owners;
  for (const size_t size : {10, 4096, 100'000, 5'000'000}) {
    Piece piece = make_piece(size, size);
    owners.push_back(piece.owner);
    at(0).send(1, say("x", {std::move(piece)}));
  }
  receiver(1).take(4).clear();
  at(0).wait_below(1, 0, in_time());
  EXPECT_TRUE(
      eventually([&] { return std::all_of(owners.begin(), owners.end(), [](auto& o) { return o.expired(); }); }));
}

TEST_P(TransportContract, PiecesThatCameAreTheReceiversToWriteAndToKeep) {
  open(2);
  for (uint64_t i = 0; i < 3; ++i) at(0).send(1, say("", {make_piece(50'000, i), make_piece(2'000'000, 10 + i)}));
  auto got = receiver(1).take(3);
  at(0).send(1, say("", {make_piece(2'000'000, 99)}));  // must not reuse the memory of the others
  auto last = receiver(1).take(1);
  end_all();
  ASSERT_EQ(got.size(), 3U);
  for (uint64_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(is_whole(got[i].pieces[0], i) && is_whole(got[i].pieces[1], 10 + i));
    for (const Piece& piece : got[i].pieces) {
      ASSERT_TRUE(piece.owner);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(piece.data) % 64, 0U);
      std::memset(piece.data, 7, piece.bytes);
    }
  }
  EXPECT_TRUE(is_whole(last.at(0).pieces.at(0), 99));
}

// Fills the connection to rank 1, whose receiver blocks at `gate`. Returns the number of messages of 1 MB.
size_t fill_way(transport::Transport& transport) {
  size_t sent = 0;
  while (transport.backlog(1) < (size_t{8} << 20) && sent < 2000) {
    transport.send(1, say("m", {make_piece(1 << 20, sent)}));
    ++sent;
  }
  return sent;
}

TEST_P(TransportContract, WhoDoesNotReadIsSeenInTheBacklog) {
  Gate gate;
  std::atomic<size_t> came{0};
  receiver(1).on = [&](int, std::string_view, std::vector<Piece>& pieces) {
    gate.pass();
    EXPECT_TRUE(is_whole(pieces.at(0), came++));
  };
  open(3);
  const size_t sent = fill_way(at(0));
  EXPECT_GE(at(0).backlog(1), size_t{8} << 20);
  try {
    at(0).wait_below(1, size_t{1} << 20, Deadline::after(milliseconds(100)));
    ADD_FAILURE() << "the backlog went away";
  } catch (const TimeoutError& error) {
    EXPECT_EQ(error.missing(), std::vector<int>{1});
  }
  // The other ranks are not held up.
  at(0).send(2, say("meanwhile"));
  EXPECT_EQ(receiver(2).take(1).at(0).body, "meanwhile");
  at(2).send(0, say("back"));
  EXPECT_EQ(receiver(0).take(1).at(0).body, "back");
  EXPECT_TRUE(eventually([&] { return at(0).backlog(2) == 0; }));
  gate.open();
  at(0).wait_below(1, 0, in_time());
  EXPECT_EQ(at(0).backlog(1), 0U);
  EXPECT_TRUE(eventually([&] { return came == sent; })) << came << " of " << sent;
}

// This includes the bytes that the connection takes only later.
TEST_P(TransportContract, APieceComesAsItWasWhenItWasSent) {
  Gate gate;
  std::atomic<int> came{0};
  receiver(1).on = [&](int, std::string_view, std::vector<Piece>& pieces) {
    gate.pass();
    for (size_t i = 0; i < pieces.size(); ++i) EXPECT_TRUE(is_whole(pieces[i], i)) << pieces[i].bytes << " bytes";
    ++came;
  };
  open(2);
  // The receiver blocks at the gate with the first message. The connection takes some of the second and nothing of the
  // third.
  const std::vector<std::vector<size_t>> messages = {{}, {10, size_t{40} << 20}, {100, 5000, 20'000, 100'000, 3 << 20}};
  for (const auto& sizes : messages) {
    std::vector<Piece> pieces;
    for (size_t i = 0; i < sizes.size(); ++i) pieces.push_back(make_piece(sizes[i], i));
    at(0).send(1, say("m", pieces));
    for (const Piece& piece : pieces) std::memset(piece.data, 0xee, piece.bytes);
  }
  EXPECT_EQ(came, 0);
  gate.open();
  EXPECT_TRUE(eventually([&] { return came == 3; })) << came;
}

TEST_P(TransportContract, FloodsInBothDirectionsDoNotStopEachOther) {
  open(2);
  constexpr size_t kMessages = 48;
  for (size_t i = 0; i < kMessages; ++i)  // no sender waits for room
    for (int rank = 0; rank < 2; ++rank)
      at(static_cast<size_t>(rank)).send(1 - rank, say("flood", {make_piece(1 << 20, i)}));
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto got = receiver(rank).take(kMessages);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(is_whole(got[i].pieces.at(0), i));
  }
}

TEST_P(TransportContract, AnswersFromWithinTheReceiver) {
  const int hops = kSanitized ? 200 : 2000;
  std::atomic<int> left{hops};
  for (size_t rank = 0; rank < 2; ++rank)
    receiver(rank).on = [&, rank](int peer, std::string_view body, std::vector<Piece>& pieces) {
      if (--left <= 0) return;
      Message answer{std::string(body), {}};
      answer.pieces = std::move(pieces);
      at(rank).send(peer, std::move(answer));
    };
  open(2);
  at(0).send(1, say("hop", {make_piece(30'000, 5)}));
  EXPECT_TRUE(eventually([&] { return left <= 0; })) << left;
}

TEST_P(TransportContract, WhatWasSentBeforeTheEndComesBeforeIt) {
  std::atomic<int> came{0};
  receiver(1).on = [&](int, std::string_view body, std::vector<Piece>& pieces) {
    EXPECT_EQ(body, std::to_string(came++));
    EXPECT_TRUE(is_whole(pieces.at(0), 3));
  };
  open(2);
  for (int i = 0; i < 100; ++i) at(0).send(1, say(std::to_string(i), {make_piece(i % 10 == 0 ? 3'000'000 : 100, 3)}));
  at(1).send(0, say("unread"));
  at(0).close(in_time());
  EXPECT_NE(receiver(1).cause(0).find("left"), std::string::npos) << receiver(1).cause(0);
  EXPECT_EQ(came, 100);
  EXPECT_THROW(at(0).send(1, say("late")), PeerLost);
  at(0).close(in_time());  // a second close() does nothing
}

TEST_P(TransportContract, TheEndOfOneDoesNotTouchTheOthers) {
  open(3);
  at(1).send(0, say("last"));
  end(1);
  EXPECT_EQ(receiver(0).take(1).at(0).body, "last");
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    const std::string cause = receiver(rank).cause(1);
    EXPECT_NE(cause.find("left"), std::string::npos) << cause;
    EXPECT_EQ(cause_of_sending(at(rank), 1), cause);
    EXPECT_THROW(at(rank).wait_below(1, 0, in_time()), PeerLost);
    EXPECT_EQ(at(rank).backlog(1), 0U);
  }
  for (int i = 0; i < 20; ++i) {
    at(0).send(2, say("on"));
    at(2).send(0, say("and on"));
  }
  EXPECT_EQ(receiver(2).take(20).size(), 20U);
  EXPECT_EQ(receiver(0).take(20).size(), 20U);
  EXPECT_FALSE(receiver(0).is_lost(2) || receiver(2).is_lost(0));
}

TEST_P(TransportContract, WhoWaitsForRoomOrSendsHearsOfTheEnd) {
  Gate gate;
  receiver(1).on = [&](int, std::string_view, std::vector<Piece>&) { gate.pass(); };
  open(2);
  fill_way(at(0));
  std::thread waiter([&] { EXPECT_THROW(at(0).wait_below(1, 0, in_time()), PeerLost); });
  std::thread sender([&] {
    const auto send_on = [&] {
      for (;;) at(0).send(1, say("late"));
    };
    EXPECT_THROW(send_on(), PeerLost);
  });
  at(0).close(Deadline::after(milliseconds(50)));  // rank 1 does not read, so this ends at its deadline
  waiter.join();
  sender.join();
  gate.open();
  end_all();  // before the gate
}

TEST_P(TransportContract, MessagesAboveTheLimitsAreRefusedAndNothingElse) {
  Limits limits;
  limits.body = 1000;
  limits.pieces = 3;
  limits.bytes = 5000;
  open(2, limits);
  EXPECT_THROW(at(0).send(1, say(std::string(1001, 'x'))), InvalidArgument);
  EXPECT_THROW(at(0).send(1, say("x", std::vector<Piece>(4))), InvalidArgument);
  EXPECT_THROW(at(0).send(1, say("x", {make_piece(5000, 0)})), InvalidArgument);
  at(0).send(1, say(std::string(1000, 'x'), {make_piece(4000, 0), make_piece(0, 0), make_piece(0, 0)}));
  EXPECT_EQ(receiver(1).take(1).at(0).pieces.size(), 3U);
}

TEST_P(TransportContract, ThereMustBeSuchAPeer) {
  open(2);
  for (const int peer : {-1, 0, 2, 1000}) {
    if (peer == 0 && GetParam().to_itself) continue;
    EXPECT_THROW(at(0).send(peer, say("x")), InvalidArgument);
    EXPECT_THROW(at(0).backlog(peer), InvalidArgument);
    EXPECT_THROW(at(0).wait_below(peer, 0, in_time()), InvalidArgument);
  }
}

TEST_P(TransportContract, EndsWhileMessagesFly) {
  for (int round = 0; round < (kSanitized ? 3 : 10); ++round) {
    open(3);
    std::vector<std::thread> senders;
    std::atomic<int> running{0};
    for (size_t rank = 0; rank < 3; ++rank)
      for (int k = 0; k < 2; ++k)
        senders.emplace_back([&, rank] {
          std::mt19937 random(static_cast<uint32_t>(rank));
          std::set<int> lost;
          ++running;
          for (int i = 0; lost.size() < 2; ++i) {
            const int peer = static_cast<int>((rank + 1 + static_cast<size_t>(i % 2)) % 3);
            try {
              at(rank).send(peer, telling(0, i, random));
              at(rank).wait_below(peer, size_t{4} << 20, in_time());
            } catch (const PeerLost&) {
              lost.insert(peer);
            }
          }
        });
    EXPECT_TRUE(eventually([&] { return running == 6; }));
    at(static_cast<size_t>(round) % 3).close(Deadline::after(milliseconds(round % 2 * 200)));
    for (size_t rank = 0; rank < 3; ++rank) at(rank).close(Deadline::after(milliseconds(100)));
    for (auto& sender : senders) sender.join();
    end_all();
    forget_all();
  }
}

TEST_P(TransportContract, EightTalkToEachOther) {
  constexpr size_t kRanks = 8;
  const int each = kSanitized ? 10 : 60;
  open(kRanks);
  std::vector<std::thread> senders;
  for (size_t rank = 0; rank < kRanks; ++rank)
    senders.emplace_back([&, rank] {
      std::mt19937 random(static_cast<uint32_t>(rank));
      for (int i = 0; i < each; ++i)
        for (size_t peer = 0; peer < kRanks; ++peer)
          if (peer != rank)
            at(rank).send(static_cast<int>(peer), say(std::to_string(i), {make_piece(random() % 30'000, rank)}));
    });
  for (auto& sender : senders) sender.join();
  for (size_t rank = 0; rank < kRanks; ++rank) {
    std::vector<int> next(kRanks, 0);
    for (const auto& got : receiver(rank).take((kRanks - 1) * static_cast<size_t>(each))) {
      EXPECT_EQ(got.body, std::to_string(next[static_cast<size_t>(got.peer)]++));
      EXPECT_TRUE(is_whole(got.pieces.at(0), static_cast<uint64_t>(got.peer)));
    }
  }
}

}  // namespace
}  // namespace muster::test
