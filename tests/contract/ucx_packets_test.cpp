// The ucx transport without UCX: the contract over a fabric whose packets arrive in any order, and peers that break the
// protocol.
#include <future>

#include "contract/ucx_fixture.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "transport/piece.h"

namespace muster::test::ucx_peers {
namespace {

using testing::AllOf;
using transport::Limits;
using transport::Message;
using transport::Receiver;
using transport::Transport;
using transport::ucx::Header;
using transport::ucx::Key;
using transport::ucx::Kind;

std::vector<std::unique_ptr<Transport>> make_packet_mesh(const std::vector<Receiver*>& receivers,
                                                         const Limits& limits) {
  static std::atomic<uint32_t> seed{1};
  const auto store = make_memory_store();
  const auto hub = std::make_shared<Hub>(seed++);
  std::vector<std::unique_ptr<Transport>> made(receivers.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < made.size(); ++rank)
    threads.emplace_back([&, rank] {
      auto options = options_of(rank, made.size(), hub);
      options.limits = limits;
      if (rank % 2 == 1) options.spin = std::chrono::microseconds(20);
      made[rank] = transport::make_ucx_transport(options, directory_of(store), *receivers[rank], in_time());
    });
  for (auto& thread : threads) thread.join();
  return made;
}

INSTANTIATE_TEST_SUITE_P(UcxPackets, TransportContract, testing::Values(TransportKind{"any_order", make_packet_mesh}),
                         transport_kind_name);

// The test plays rank 1 of 2; rank 0 is a transport.
class UcxByHand : public testing::Test, private transport::ucx::FabricEvents {
 protected:
  // A transfer of the test, with the data that it reads.
  struct Sending final : transport::ucx::Transfer {
    Header header;
    std::string data;
    bool done = false;
    std::string error;
    void on_done(const char* why) override {
      done = true;
      error = why ? why : "";
    }
  };

  UcxByHand() { limits = {.body = 1 << 20, .pieces = 100, .bytes = size_t{16} << 20}; }
  ~UcxByHand() override {
    fabric.reset();  // so that rank 0 does not wait for an answer to its goodbye
    transport.reset();
  }

  void join() {
    auto options = options_of(0, 2, hub);
    options.names = {"alice", "bob"};
    options.limits = limits;
    options.heartbeat = heartbeat;
    auto made = std::async(std::launch::async,
                           [=, this] { return make_ucx_transport(options, directory_of(store), receiver, in_time()); });
    entry = UcxEntry::parse(store->get("test/ucx/0", in_time()));
    fabric = std::make_unique<FakeFabric>(*hub, static_cast<transport::ucx::FabricEvents&>(*this));
    ASSERT_EQ(fabric->connect(0, entry.address), nullptr);
    store->set("test/ucx/1", UcxEntry{own, 2, 4711, own_heartbeat.count(), fabric->address()}.text());
    send(header(Kind::kHello, 0));
    wait([&] { return heard.contains(Kind::kWelcome); });
    send(header(Kind::kWelcome, 0));
    wait([&] { return heard.contains(Kind::kReady); });
    send(header(Kind::kReady, 0));
    transport = made.get();
  }
  Header header(Kind kind, uint64_t number) const {
    Header mine;
    mine.kind = kind;
    mine.from = 1;
    mine.key = entry.key;
    mine.number = number;
    return mine;
  }
  Sending& send(const Header& header, std::string data = {}, bool offered = false) {
    Sending& sending = *sendings.emplace_back(std::make_unique<Sending>());
    sending.header = header;
    if (header.kind == Kind::kFrame || header.kind == Kind::kPiece) sending.header.size = data.size();
    sending.data = std::move(data);
    transport::ucx::State state = transport::ucx::State::kUnderWay;
    const char* const error =
        fabric->send(0, sending.header.bytes(), std::as_bytes(std::span(sending.data)), offered, sending, state);
    EXPECT_EQ(error, nullptr);
    sending.done = state == transport::ucx::State::kDone;
    return sending;
  }
  template <typename Condition>
  void wait(Condition condition) {
    for (const auto deadline = in_time(); !condition();) {
      ASSERT_FALSE(deadline.passed());
      if (!fabric->progress()) ::sched_yield();
    }
  }
  // A valid message.
  Sending& say(uint64_t number, const std::string& body) {
    Header mine = header(Kind::kFrame, number);
    mine.body = mine.total = body.size();
    return send(mine, body);
  }
  // The frame of a message with pieces of these sizes.
  std::pair<Header, std::string> frame(uint64_t number, const std::vector<size_t>& sizes) {
    Message message{"body", {}};
    for (const size_t size : sizes) message.pieces.push_back(transport::make_piece(size));
    for (auto& piece : message.pieces) std::memset(piece.data, 'p', piece.bytes);
    const auto packed = transport::ucx::pack(message);
    Header mine = header(Kind::kFrame, number);
    mine.count = packed.count;
    mine.body = packed.body;
    mine.total = packed.total;
    return {mine, packed.data};
  }
  void expect_lost_for(const std::string& why) {
    EXPECT_THAT(receiver.cause(1), AllOf(HasSubstr("bob (pid 4711) is lost: "), HasSubstr(why)));
    EXPECT_THROW(transport->send(1, {"x", {}}), PeerLost);
  }
  void expect_broken(const std::string& rule) { expect_lost_for("it broke the protocol: " + rule); }

  void on_arrival(std::span<const std::byte> bytes, std::span<const std::byte> data) override {
    const Header head = Header::parse(bytes);
    heard[head.kind].push_back(head);
    EXPECT_EQ(head.key, own);
    EXPECT_EQ(head.from, 0U);
    last = std::string(reinterpret_cast<const char*>(data.data()), data.size());
  }
  void on_offer(std::span<const std::byte>, size_t, transport::ucx::Offer* offer) override { offered.push_back(offer); }
  void on_broken(int, const char*) override { is_cut = true; }

  const std::shared_ptr<Hub> hub = std::make_shared<Hub>(7);
  const std::shared_ptr<Store> store = make_memory_store();
  Limits limits;
  milliseconds heartbeat = std::chrono::seconds(60), own_heartbeat = heartbeat;
  const Key own = transport::ucx::make_key();
  UcxEntry entry;  // of rank 0
  Recorder receiver;
  std::vector<std::unique_ptr<Sending>> sendings;  // before the fabric, which may still touch them
  std::unique_ptr<FakeFabric> fabric;
  std::unique_ptr<Transport> transport;
  std::map<Kind, std::vector<Header>> heard;
  std::string last;
  std::vector<transport::ucx::Offer*> offered;
  bool is_cut = false;
};

TEST_F(UcxByHand, MessagesThatOvertakeEachOtherComeInOrder) {
  join();
  for (uint64_t number = 50; number >= 1; --number) say(number, std::to_string(number));
  const auto got = receiver.take(50);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i].body, std::to_string(i + 1));
}

TEST_F(UcxByHand, PiecesMayComeBeforeTheirMessage) {
  join();
  const auto [head, data] = frame(1, {20'000, 5, 0, 100'000});
  Header piece = header(Kind::kPiece, 1);
  piece.count = 3;
  const Sending& late = send(piece, std::string(100'000, 'P'), true);
  piece.count = 0;
  send(piece, std::string(20'000, 'Q'));
  say(2, "after");
  say(3, "it");
  transport->send(1, {"so far", {}});
  wait([&] { return heard.contains(Kind::kFrame); });  // it has had a turn
  EXPECT_EQ(receiver.num_got(), 0U);
  EXPECT_FALSE(late.done);
  send(head, data);
  const auto got = receiver.take(3);
  ASSERT_EQ(got.size(), 3U);
  const auto& pieces = got[0].pieces;
  ASSERT_EQ(pieces.size(), 4U);
  const auto is_all = [](const transport::Piece& piece, char letter) {
    return std::all_of(piece.data, piece.data + piece.bytes,
                       [=](std::byte byte) { return byte == static_cast<std::byte>(letter); });
  };
  EXPECT_TRUE(is_all(pieces[0], 'Q') && is_all(pieces[1], 'p') && is_all(pieces[3], 'P'));
  EXPECT_EQ(got[1].body + got[2].body, "afterit");
  wait([&] { return late.done; });
}

TEST_F(UcxByHand, WhatIsOfferedIsFetchedOnlyWithinTheLimits) {
  join();
  Header mine = header(Kind::kFrame, 1);
  mine.body = mine.total = limits.body + 1;
  const Sending& much = send(mine, std::string(limits.body + 1, 'x'), true);
  expect_broken("a message of 1048577 bytes with a body of 1048577; at most 16777216 and 1048576 are allowed");
  EXPECT_EQ(hub->fetched(), 0U);
  wait([&] { return much.done; });
  EXPECT_NE(much.error, "");  // refused, or cancelled
}

TEST_F(UcxByHand, AnOfferLongerThanItsMessageIsNotFetched) {
  join();
  Header mine = header(Kind::kFrame, 1);
  mine.body = mine.total = 10;
  send(mine, std::string(1 << 20, 'x'), true);
  expect_broken("a frame of another length than its header says");
  EXPECT_EQ(hub->fetched(), 0U);
}

TEST_F(UcxByHand, OffersForNobodyAreRefused) {
  join();
  Header other = header(Kind::kFrame, 1);
  other.body = other.total = 100'000;
  other.key[3] ^= 1;  // of another job
  const Sending& stray = send(other, std::string(100'000, 'x'), true);
  Header nobody = header(Kind::kFrame, 1);
  nobody.from = 7;
  send(nobody, "x");
  send(header(Kind::kHello, 0), "", false);
  Header wrong = header(Kind::kFrame, 1);
  wrong.magic ^= 1;
  send(wrong, "x");
  wait([&] { return stray.done; });
  EXPECT_EQ(stray.error, "refused");
  say(1, "fine");  // the connection still works
  EXPECT_EQ(receiver.take(1).at(0).body, "fine");
  EXPECT_FALSE(receiver.is_lost(1));
}

TEST_F(UcxByHand, AMessageTwice) {
  join();
  say(2, "one");
  say(2, "two");
  expect_broken("a message that came twice");
  EXPECT_EQ(receiver.num_got(), 0U);
}

TEST_F(UcxByHand, AMessageThatHasBeenTaken) {
  join();
  say(1, "one");
  receiver.take(1);
  say(1, "again");
  expect_broken("a packet of message 1 where 2 is the next");
}

TEST_F(UcxByHand, AMessageFarAhead) {
  join();
  say(uint64_t{1} << 40, "one");
  expect_broken("a packet of message 1099511627776 where 1 is the next");
}

TEST_F(UcxByHand, AKindThatThereIsNot) {
  join();
  Header mine = header(static_cast<Kind>(77), 1);
  send(mine, "x");
  say(1, "fine");  // such a packet cannot be attributed to a peer
  EXPECT_EQ(receiver.take(1).at(0).body, "fine");
}

TEST_F(UcxByHand, MorePiecesThanTheLimit) {
  join();
  const auto [head, data] = frame(1, std::vector<size_t>(101, 1));
  send(head, data);
  expect_broken("a message of 101 pieces; at most 100 are allowed");
}

TEST_F(UcxByHand, PiecesOfMoreThanTheHeaderSays) {
  join();
  auto [head, data] = frame(1, {10, 20});
  const uint64_t lie = uint64_t{1} << 63;
  std::memcpy(data.data() + 8, &lie, sizeof lie);
  send(head, data);
  expect_broken("pieces of more bytes than the header of their message says");
}

TEST_F(UcxByHand, AFrameThatIsShorterThanItsPieces) {
  join();
  auto [head, data] = frame(1, {10, 2000});
  data.resize(data.size() - 1);
  send(head, data);
  expect_broken("a frame that is shorter than its pieces");
}

TEST_F(UcxByHand, AFrameWithoutItsTable) {
  join();
  const auto [head, data] = frame(1, {10, 2000});
  send(head, data.substr(0, 12));
  expect_broken("a frame of another length than its header says");
}

TEST_F(UcxByHand, AFrameWithBytesAfterItsEnd) {
  join();
  const auto [head, data] = frame(1, {10});
  send(head, data + "x");
  expect_broken("a frame of another length than its pieces have");
}

TEST_F(UcxByHand, APieceThatTheMessageDoesNotHave) {
  for (const uint32_t index : {0U, 2U, 4'000'000'000U}) {  // a small piece, one of another size, and none
    join();
    const auto [head, data] = frame(1, {10, 20'000, 30'000});
    Header piece = header(Kind::kPiece, 1);
    piece.count = index;
    send(piece, std::string(20'000, 'P'));
    send(head, data);
    expect_broken("a piece that its message does not have");
    fabric.reset();
    transport.reset();
    sendings.clear();
    heard.clear();
    receiver.forget();
    for (const char* key : {"test/ucx/0", "test/ucx/1"}) store->erase(key);
  }
}

TEST_F(UcxByHand, APieceTwice) {
  join();
  const auto [head, data] = frame(1, {20'000, 20'000});
  Header piece = header(Kind::kPiece, 1);
  for (int i = 0; i < 2; ++i) send(piece, std::string(20'000, 'P'));
  send(head, data);
  expect_broken("a piece that came twice");
}

TEST_F(UcxByHand, AGoodbyeWithContents) {
  join();
  send(header(Kind::kGoodbye, 1), "but");
  expect_broken("a goodbye with contents");
}

TEST_F(UcxByHand, ThatItHasTakenWhatWasNotSent) {
  join();
  Header ack = header(Kind::kAck, 0);
  ack.taken = 3;
  send(ack);
  expect_broken("it has taken message 3 of 0");
}

TEST_F(UcxByHand, WhatCameBeforeABreakIsDelivered) {
  join();
  say(1, "one");
  say(2, "two");
  fabric->disconnect(0);
  expect_lost_for("the way to it broke: cut");
  EXPECT_EQ(receiver.take(2).at(1).body, "two");
}

TEST_F(UcxByHand, TheWindowClosesUntilItIsAcknowledged) {
  join();
  for (int i = 0; i < 20; ++i) transport->send(1, {std::string(1 << 20, 'x'), {}});
  wait([&] { return offered.size() == 7; });  // 8 MB, minus the overhead of each message
  for (int i = 0; i < 1000; ++i) fabric->progress();
  EXPECT_EQ(offered.size(), 7U);
  EXPECT_EQ(transport->backlog(1), size_t{20} << 20);
  Header ack = header(Kind::kAck, 0);
  ack.taken = 5;
  send(ack);
  wait([&] { return offered.size() == 12; });
  for (int i = 0; i < 1000; ++i) fabric->progress();
  EXPECT_EQ(offered.size(), 12U);
}

TEST_F(UcxByHand, ALargeMessageDoesNotWaitForTwoSmallOnes) {
  join();
  for (const char* small : {"one", "two"}) transport->send(1, {small, {}});
  transport->send(1, {"three", {transport::make_piece(size_t{9} << 20)}});  // more than the window
  wait([&] { return heard[Kind::kFrame].size() == 3 && offered.size() == 9; });
  // But the next one does.
  transport->send(1, {"four", {}});
  for (int i = 0; i < 1000; ++i) fabric->progress();
  EXPECT_EQ(heard[Kind::kFrame].size(), 3U);
  Header ack = header(Kind::kAck, 0);
  ack.taken = 3;
  send(ack);
  wait([&] { return heard[Kind::kFrame].size() == 4; });
}

TEST_F(UcxByHand, WhoIsSilentIsLostAndHearsFromUsMeanwhile) {
  heartbeat = milliseconds(kSanitized ? 5000 : 2500);
  const auto begin = Clock::now();  // before this, rank 0 hears nothing from rank 1
  join();
  wait([&] { return heard[Kind::kAck].size() >= 2; });  // its heartbeats
  expect_lost_for("nothing was heard of it for");
  EXPECT_GE(Clock::now() - begin, heartbeat);
}

TEST_F(UcxByHand, HearsFromUsAlsoWhileTheReceiverIsBusy) {
  own_heartbeat = milliseconds(400);
  const auto gate = std::make_shared<Gate>();
  receiver.on = [gate](int, std::string_view, std::vector<transport::Piece>&) { gate->pass(); };
  join();
  say(1, "work");
  const size_t before = heard[Kind::kAck].size();
  wait([&] { return heard[Kind::kAck].size() >= before + 3; });
  gate->open();
}

TEST_F(UcxByHand, WhoLeavesIsAnsweredAtOnce) {
  join();
  say(1, "last");
  send(header(Kind::kGoodbye, 2));
  EXPECT_EQ(receiver.cause(1), "bob (pid 4711) left");
  EXPECT_EQ(receiver.take(1).at(0).body, "last");
  wait([&] { return heard.contains(Kind::kAck) && heard[Kind::kAck].back().taken == 2; });
}

TEST_F(UcxByHand, CloseWaitsUntilAllIsDelivered) {
  join();
  transport->send(1, {"one", {}});
  auto closing = std::async(std::launch::async, [&] {
    transport->close(in_time());
    return Clock::now();
  });
  wait([&] { return heard.contains(Kind::kGoodbye); });
  EXPECT_EQ(heard[Kind::kGoodbye].at(0).number, 2U);
  Header ack = header(Kind::kAck, 0);
  ack.taken = 1;
  send(ack);
  EXPECT_EQ(closing.wait_for(milliseconds(50)), std::future_status::timeout);
  const auto before = Clock::now();
  ack.taken = 2;
  send(ack);
  EXPECT_GE(closing.get(), before);
  EXPECT_FALSE(receiver.is_lost(1));  // the answer to the goodbye is not a loss
}

TEST_F(UcxByHand, WhoDoesNotTakeTheGoodbyeIsToldThatThereIsNoMore) {
  join();
  transport->send(1, {"one", {}});
  transport->close(Deadline::after(milliseconds(20)));
  wait([&] { return heard.contains(Kind::kGone); });
}

}  // namespace
}  // namespace muster::test::ucx_peers
