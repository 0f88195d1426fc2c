// The shared-memory transport: the contract, and its own feature: blocks that change owners.

#include <gmock/gmock.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>

#include "base/text.h"
#include "contract/transport_contract.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "shm/exchange.h"
#include "shm/mapping.h"
#include "support/asleep.h"
#include "support/dice.h"
#include "support/fuzz.h"
#include "support/sanitized.h"
#include "support/served.h"
#include "transport/shm/inbox.h"
#include "transport/shm/shm_transport.h"

namespace muster::test {
namespace {

using transport::Limits;
using transport::Message;
using transport::Piece;
using transport::Receiver;
using transport::Transport;

// Copies pieces that are valid only during the call.
class Keeping final : public Receiver {
 public:
  explicit Keeping(Receiver& to) : to_(to) {}
  void on_message(int peer, std::string_view body, std::vector<Piece>& pieces) override {
    for (Piece& piece : pieces) {
      if (piece.owner) continue;
      const std::shared_ptr<std::byte> copy(new std::byte[piece.bytes + 1], std::default_delete<std::byte[]>());
      if (piece.bytes) std::memcpy(copy.get(), piece.data, piece.bytes);
      piece.data = copy.get();
      piece.owner = copy;
    }
    to_.on_message(peer, body, pieces);
  }
  void on_lost(int peer, const std::string& cause) override { to_.on_lost(peer, cause); }

 private:
  Receiver& to_;
};

// A transport and everything that it needs, behind one pointer.
class Whole final : public Transport {
 public:
  Whole(int rank, int size, const std::shared_ptr<Store>& store, Receiver& receiver, const Limits& limits)
      : receiver_(receiver), heap_(std::make_shared<shm::Arena>(size_t{4} << 30)) {
    transport::ShmOptions options{.rank = rank, .heap = heap_, .watch = std::make_shared<shm::PeerWatch>()};
    for (int i = 0; i < size; ++i) options.workers.push_back(i);
    options.prefix = "test";
    options.limits = limits;
    const shm::NoticeBoard board{[&](const auto& key, const auto& value) { store->set(key, value); },
                                 [&](const auto& key, Deadline until) { return store->get(key, until); }};
    mine_ = transport::make_shm_transport(options, board, receiver_, in_time());
  }
  std::string_view name() const override { return mine_->name(); }
  void send(int peer, Message message) override { mine_->send(peer, std::move(message)); }
  size_t backlog(int peer) const override { return mine_->backlog(peer); }
  void wait_below(int peer, size_t bytes, Deadline deadline) override { mine_->wait_below(peer, bytes, deadline); }
  bool poll() override { return mine_->poll(); }
  void sleep(std::chrono::nanoseconds limit) override { mine_->sleep(limit); }
  void wake() override { mine_->wake(); }
  void close(Deadline flush) override { mine_->close(flush); }
  shm::Arena& heap() { return *heap_; }

 private:
  Keeping receiver_;
  std::shared_ptr<shm::Arena> heap_;
  std::shared_ptr<transport::PolledTransport> mine_;
};

std::vector<std::unique_ptr<Transport>> make_all(const std::vector<Receiver*>& receivers, const Limits& limits) {
  const auto store = make_memory_store();
  std::vector<std::unique_ptr<Transport>> made(receivers.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < receivers.size(); ++i)
    threads.emplace_back([&, i] {
      made[i] = std::make_unique<Whole>(static_cast<int>(i), static_cast<int>(receivers.size()), store, *receivers[i],
                                        limits);
    });
  for (auto& thread : threads) thread.join();
  return made;
}

INSTANTIATE_TEST_SUITE_P(Shm, TransportContract,
                         testing::Values(TransportKind{
                             .name = "shm", .make = make_all, .is_driven = true, .to_itself = true}),
                         transport_kind_name);

class ShmTransport : public TransportContract {
 protected:
  void SetUp() override {}  // this transport is always there
  void open_shm(size_t n) {
    for (size_t i = 0; i < n; ++i) wanted_.push_back(&receiver(i));
    all_ = make_all(wanted_, {});
  }
  Whole& whole(size_t rank) { return static_cast<Whole&>(*all_[rank]); }
  void poll_until(const std::function<bool()>& done) {
    for (const auto end = in_time(); !done() && !end.passed();)
      for (auto& one : all_) one->poll();
    EXPECT_TRUE(done());
  }
  std::vector<Receiver*> wanted_;
  std::vector<std::unique_ptr<Transport>> all_;
};

Piece on_heap(shm::Arena& heap, size_t bytes) {
  auto* const data = static_cast<std::byte*>(heap.allocate(bytes));
  return {.data = data,
          .bytes = bytes,
          .owner = std::shared_ptr<void>(data, [&heap](void* gone) { heap.free(gone); }),
          .unique = true};
}

TEST_F(ShmTransport, AUniquePieceOfTheHeapIsLentAndComesBack) {
  open_shm(2);
  constexpr size_t kBytes = 1 << 20;
  Message message{.body = "lend", .pieces = {}};
  message.pieces.push_back(on_heap(whole(0).heap(), kBytes));
  std::memset(message.pieces[0].data, 7, kBytes);
  whole(0).send(1, std::move(message));
  poll_until([&] { return receiver(1).num_got() == 1; });
  auto got = receiver(1).take(1);
  EXPECT_EQ(got[0].pieces[0].data[kBytes - 1], std::byte{7});
  EXPECT_EQ(whole(0).heap().used(), kBytes);  // lent, not free
  EXPECT_EQ(whole(1).heap().used(), 0u);      // and not copied
  got.clear();
  poll_until([&] { return whole(0).heap().used() == 0; });
}

TEST_F(ShmTransport, ALentBlockGoesHomeInAMessage) {
  open_shm(2);
  constexpr size_t kBytes = 1 << 20;
  Message message{.body = "lend", .pieces = {}};
  message.pieces.push_back(on_heap(whole(0).heap(), kBytes));
  std::byte* const where = message.pieces[0].data;
  whole(0).send(1, std::move(message));
  poll_until([&] { return receiver(1).num_got() == 1; });
  auto got = receiver(1).take(1);
  Message home{.body = "home", .pieces = {}};
  home.pieces.push_back(std::move(got[0].pieces[0]));
  home.pieces[0].unique = true;
  got.clear();
  whole(1).send(0, std::move(home));
  poll_until([&] { return receiver(0).num_got() == 1; });
  auto back = receiver(0).take(1);
  EXPECT_EQ(back[0].pieces[0].data, where);
  back.clear();
  poll_until([&] { return whole(0).heap().used() == 0 && whole(1).heap().used() == 0; });
}

TEST_F(ShmTransport, ManyPiecesOfEverySizeInOneMessage) {
  open_shm(2);
  Message message{.body = std::string(300'000, 'b'), .pieces = {}};
  std::vector<std::string> sent;
  for (size_t i = 0; i < 5000; ++i)
    sent.push_back(std::string(i % 97 == 0 ? 20'000 + i : i % 50, static_cast<char>('a' + i % 26)));
  for (std::string& bytes : sent)
    message.pieces.push_back({.data = reinterpret_cast<std::byte*>(bytes.data()), .bytes = bytes.size()});
  whole(0).send(1, std::move(message));
  poll_until([&] { return receiver(1).num_got() == 1; });
  auto got = receiver(1).take(1);
  EXPECT_EQ(got[0].body, std::string(300'000, 'b'));
  ASSERT_EQ(got[0].pieces.size(), sent.size());
  for (size_t i = 0; i < sent.size(); ++i)
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(got[0].pieces[i].data), got[0].pieces[i].bytes), sent[i]) << i;
  got.clear();
  poll_until([&] { return whole(0).heap().used() == 0; });
}

TEST_F(ShmTransport, ToItself) {
  open_shm(1);
  whole(0).send(0, {.body = "mine", .pieces = {}});
  poll_until([&] { return receiver(0).num_got() == 1; });
  EXPECT_EQ(receiver(0).take(1)[0].body, "mine");
}

TEST_F(ShmTransport, WhatCanWaitWakesNobodyBeforeItsSenderHasTime) {
  open_shm(2);
  std::atomic<pid_t> sleeper{0};
  std::atomic<int> sleeps{0};
  std::atomic<bool> over{false};
  std::thread thread([&] {
    sleeper = ::gettid();
    while (!over) {
      while (whole(1).poll()) {
      }
      ++sleeps;
      if (!over) whole(1).sleep(std::chrono::hours(1));
    }
  });
  int seen = 0;
  const auto asleep_again = [&] {
    const bool slept = eventually([&] { return sleeps > seen && is_asleep(sleeper); });
    seen = sleeps;
    return slept;
  };
  ASSERT_TRUE(asleep_again());
  for (int i = 0; i < 5; ++i) whole(0).send(1, {.body = "later", .pieces = {}, .can_wait = true});
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // in this time nothing must happen
  EXPECT_EQ(sleeps, seen);
  EXPECT_EQ(receiver(1).num_got(), 0u);
  whole(0).sleep(std::chrono::milliseconds(1));
  ASSERT_TRUE(asleep_again());
  EXPECT_EQ(receiver(1).num_got(), 5u);
  // They arrive after a millisecond if the sender only polls,
  whole(0).send(1, {.body = "later", .pieces = {}, .can_wait = true});
  ASSERT_TRUE(eventually([&] { return whole(0).poll(), receiver(1).num_got() == 6; }));
  ASSERT_TRUE(asleep_again());
  // earlier if there are many,
  for (int i = 0; i < 100; ++i) whole(0).send(1, {.body = "later", .pieces = {}, .can_wait = true});
  ASSERT_TRUE(asleep_again());
  EXPECT_GT(receiver(1).num_got(), 6u);
  // and with the next message that cannot wait, in order.
  whole(0).send(1, {.body = "last", .pieces = {}});
  ASSERT_TRUE(eventually([&] { return receiver(1).num_got() == 107; }));
  const auto got = receiver(1).take(107);
  EXPECT_EQ(got[105].body, "later");
  EXPECT_EQ(got[106].body, "last");
  over = true;
  whole(1).wake();
  thread.join();
}

// --- a peer with a defect ---

using transport::shm_rings::InboxHeader;
using transport::shm_rings::PieceRecord;
using transport::shm_rings::RecordHeader;
using transport::shm_rings::RecordKind;
using transport::shm_rings::RingControl;
using transport::shm_rings::Where;

// The test plays rank 1 of 2: it meets rank 0, which is a transport, and writes any bytes into its ring there.
class ShmByHand {
 public:
  explicit ShmByHand(const Limits& limits) {
    const auto store = make_memory_store();
    std::thread other([&] { whole_ = std::make_unique<Whole>(0, 2, store, receiver, limits); });
    namespace rings = transport::shm_rings;
    const size_t capacity = rings::capacity_for(2);
    const UniqueFd fd = shm::create_memfd("test-inbox", rings::inbox_bytes(2, capacity));
    own_ = shm::map_memfd(fd.get());
    auto* const mine = new (own_->data()) InboxHeader;
    mine->workers = 2;
    mine->capacity = capacity;
    for (int from = 0; from < 2; ++from) new (own_->data() + rings::ring_at(from, capacity)) RingControl;
    const auto met = shm::exchange(*store, "test", 1, 2, {fd.get(), heap.fd()}, in_time());
    other.join();
    inbox_ = shm::map_memfd(met[0].fds[0].get());
    header_ = reinterpret_cast<InboxHeader*>(inbox_->data());
    ring_ = reinterpret_cast<RingControl*>(inbox_->data() + rings::ring_at(1, capacity));
  }
  void write(std::string_view record) {
    std::memcpy(reinterpret_cast<std::byte*>(ring_ + 1) + tail_, record.data(), record.size());
    publish(tail_ + record.size());
  }
  void publish(uint64_t tail) {
    ring_->tail.store(tail_ = tail);
    header_->ready[0].fetch_or(2);
    while (whole_->poll()) {
    }
  }
  Whole& whole() { return *whole_; }

  Recorder receiver;
  shm::Arena heap{size_t{1} << 30};

 private:
  std::unique_ptr<Whole> whole_;
  std::shared_ptr<shm::Mapping> own_, inbox_;
  InboxHeader* header_ = nullptr;
  RingControl* ring_ = nullptr;
  uint64_t tail_ = 0;
};

// Sets the record's length, unless the header has one.
std::string record_of(RecordHeader header, const std::vector<PieceRecord>& table = {}, size_t room = 0) {
  const size_t bytes = sizeof header + table.size() * sizeof(PieceRecord) + room;
  if (header.bytes == 0) header.bytes = static_cast<uint32_t>(bytes);
  std::string record(reinterpret_cast<const char*>(&header), sizeof header);
  record.append(reinterpret_cast<const char*>(table.data()), table.size() * sizeof(PieceRecord));
  record.resize(bytes, 'x');
  return record;
}

TEST(ShmByHand, ABrokenRecordIsItsEnd) {
  constexpr uint64_t kAll = ~uint64_t{0};
  constexpr auto kMessage = RecordKind::kMessage;
  const Limits limits{.body = 100, .pieces = 10, .bytes = 1 << 20};
  const auto piece = [&](const PieceRecord& told) { return record_of({.kind = kMessage, .pieces = 1}, {told}, 16); };
  const auto block = [&](const PieceRecord& told, RecordHeader header = {.body = 4}) {
    header.kind = kMessage;
    header.in_block = 1;
    return record_of(header, {told});
  };
  struct Case {
    std::string record, cause;
  };
  const std::vector<Case> cases = {
      {record_of({.bytes = 8, .kind = kMessage}), "a record of 8 bytes"},
      {record_of({.bytes = 24, .kind = kMessage}, {}, 16), "a record of 24 bytes"},
      {record_of({.bytes = 48, .kind = kMessage}, {}, 16), "a record of 48 bytes where there are 32"},
      {record_of({.bytes = 0xfffffff0, .kind = kMessage}), "a record of 4294967280 bytes"},
      {record_of({.kind = RecordKind{0}}), "kind 0"},
      {record_of({.kind = RecordKind{77}}), "kind 77"},
      {record_of({.kind = kMessage, .body = 17}, {}, 16), "does not fit its record"},
      {record_of({.kind = kMessage, .body = 0xffffffff}, {}, 16), "does not fit its record"},
      {record_of({.kind = kMessage, .body = 101}, {}, 112), "does not fit its record"},  // above the limit
      {record_of({.kind = kMessage, .pieces = 2}, {{}}), "does not fit its record"},
      {record_of({.kind = kMessage, .pieces = 11}, std::vector<PieceRecord>(11)), "does not fit its record"},
      {record_of({.kind = kMessage, .pieces = 0xffffffff}, {{}}), "does not fit its record"},
      {piece({.bytes = 17, .offset = 48}), "does not lie inside it"},
      {piece({.bytes = 1, .offset = 65}), "does not lie inside it"},
      {piece({.bytes = kAll, .offset = 48}), "does not lie inside it"},
      {piece({.bytes = 8, .offset = kAll - 3}), "does not lie inside it"},
      {piece({.bytes = (1 << 30) + 1, .where = Where::kMine}), "inside its sender's heap"},
      {piece({.bytes = kAll, .offset = 16, .where = Where::kMine}), "inside its sender's heap"},
      {piece({.bytes = (1 << 20) + 1, .where = Where::kMine}), "more than 1048576 bytes"},
      {piece({.bytes = 8, .offset = kAll - 3, .where = Where::kMine}), "inside its sender's heap"},
      {piece({.bytes = 8, .token = 99, .where = Where::kYours}), "a block that it does not have"},
      {piece({.bytes = 16'385, .token = 1, .where = Where::kYours}), "a block with other bounds"},
      {piece({.bytes = 8, .offset = kAll - 3, .token = 1, .where = Where::kYours}), "a block with other bounds"},
      {piece({.bytes = 8, .where = Where{77}}), "is nowhere"},
      {record_of({.kind = kMessage, .in_block = 1, .body = 4}), "a record without its block"},
      {block({.bytes = 64}), "a block that is not its sender's"},
      {block({.bytes = 16, .where = Where::kMine}), "does not fit its record"},
      {block({.bytes = kAll, .where = Where::kMine}), "inside its sender's heap"},
      {block({.bytes = 64, .where = Where::kMine}, {.body = 49}), "does not fit its record"},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.cause);
    ShmByHand peer(limits);
    Message lent{.body = "lent", .pieces = {}};
    lent.pieces.push_back(on_heap(peer.whole().heap(), 16'384));
    peer.whole().send(1, std::move(lent));  // token 1
    peer.write(record_of({.kind = kMessage, .body = 2}, {}, 16));
    EXPECT_EQ(peer.receiver.take(1)[0].body, "xx");
    peer.write(one.record);
    EXPECT_THAT(peer.receiver.cause(1), testing::HasSubstr(one.cause));
    EXPECT_EQ(peer.receiver.num_got(), 0U);
    EXPECT_THROW(peer.whole().send(1, {}), PeerLost);
    EXPECT_GE(peer.whole().heap().used(), 16'384U) << "the peer may still read what it was lent";
  }
}

// Records that are right, and mutants of them, until one is its end. What arrives lies where it may lie.
TEST(ShmByHand, AnyBytesInItsRingAreMessagesOrItsEnd) {
  constexpr auto kMessage = RecordKind::kMessage;
  const Limits limits{.body = 100, .pieces = 4, .bytes = 1 << 20};
  int64_t ends = 0, messages = 0;
  volatile std::byte sink;
  const int64_t rounds = repeat(kSanitized ? 100 : 400, [&](uint64_t number) {
    Dice dice(number);
    ShmByHand peer(limits);
    Message lent{.body = "lent", .pieces = {}};
    lent.pieces.push_back(on_heap(peer.whole().heap(), 16'384));
    const auto lent_at = static_cast<uint64_t>(lent.pieces[0].data - peer.whole().heap().base());
    peer.whole().send(1, std::move(lent));  // token 1
    const std::vector<std::string> right = {
        record_of({.kind = kMessage, .body = 2}, {}, 16),
        record_of({.kind = kMessage, .body = 2, .pieces = 1}, {{.bytes = 16, .offset = 64}}, 32),
        record_of({.kind = kMessage, .body = 2, .pieces = 1},
                  {{.bytes = 4096, .offset = 8192, .token = 7, .where = Where::kMine}}, 16),
        record_of({.kind = kMessage, .body = 2, .pieces = 1},
                  {{.bytes = 16'384, .offset = lent_at, .token = 1, .where = Where::kYours}}, 16),
        record_of({.kind = kMessage, .in_block = 1, .body = 4},
                  {{.bytes = 64, .offset = 4096, .token = 8, .where = Where::kMine}}),
        record_of({.kind = RecordKind::kRelease}, {}, 16),
        record_of({.kind = RecordKind::kSkip}),
    };
    for (int i = 0; i < 20 && !peer.receiver.is_lost(1); ++i) {
      std::string record = right[dice.below(right.size())];
      if (dice.one_in(3)) record = mutated(std::move(record), dice);
      const std::string block = dice.one_in(2) ? right[1] : dice.bytes(64);
      std::memcpy(peer.heap.base() + 4096, block.data(), block.size());
      record.resize(shm::round_up(std::max<size_t>(record.size(), 1), transport::shm_rings::kRecordAlign));
      peer.write(record);
      if (dice.one_in(20) && !peer.receiver.is_lost(1)) peer.publish(dice.number());
    }
    const auto got = peer.receiver.take(peer.receiver.num_got());
    std::byte touched{};
    for (const auto& message : got) {
      EXPECT_LE(message.body.size(), limits.body);
      EXPECT_LE(message.pieces.size(), limits.pieces);
      for (const Piece& piece : message.pieces)
        if (piece.bytes > 0)
          touched ^= piece.data[0] ^ piece.data[piece.bytes - 1];  // where there is no memory: a crash
    }
    sink = touched;
    messages += static_cast<int64_t>(got.size());
    if (!peer.receiver.is_lost(1)) return;
    ++ends;
    EXPECT_THROW(peer.whole().send(1, {}), PeerLost);
  });
  if (rounds > 50) {
    EXPECT_GT(ends, rounds / 2);
    EXPECT_GT(messages, rounds / 2);
  }
}

TEST(ShmByHand, AnInboxOfAnotherShapeIsRefused) {
  namespace rings = transport::shm_rings;
  const size_t capacity = rings::capacity_for(2), bytes = rings::inbox_bytes(2, capacity);
  const auto meets = [&](size_t size, uint64_t magic, uint64_t workers, bool with_heap) {
    const auto store = make_memory_store();
    const UniqueFd inbox = shm::create_memfd("test-inbox", size);
    const auto mapping = shm::map_memfd(inbox.get());
    auto* const header = new (mapping->data()) InboxHeader;
    header->magic = magic;
    header->workers = workers;
    header->capacity = capacity;
    const shm::Arena heap(size_t{1} << 20);
    std::thread other([&] {
      const std::vector<int> fds{inbox.get(), heap.fd()};
      shm::exchange(*store, "test", 1, 2, with_heap ? fds : std::vector<int>{inbox.get()}, in_time());
    });
    std::string error;
    Recorder receiver;
    try {
      const Whole whole(0, 2, store, receiver, {});
    } catch (const Error& refused) {
      error = refused.what();
    }
    other.join();
    return error;
  };
  EXPECT_EQ(meets(bytes, rings::kMagic, 2, true), "");
  EXPECT_THAT(meets(bytes / 2, rings::kMagic, 2, true), testing::HasSubstr("an inbox of another shape"));
  EXPECT_THAT(meets(bytes, rings::kMagic + 1, 2, true), testing::HasSubstr("an inbox of another shape"));
  EXPECT_THAT(meets(bytes, rings::kMagic, 3, true), testing::HasSubstr("an inbox of another shape"));
  EXPECT_THAT(meets(bytes, rings::kMagic, 2, false), testing::HasSubstr("sent no inbox"));
}

TEST(ShmByHand, WhoRefusesOneLeavesThoseBeforeIt) {
  namespace rings = transport::shm_rings;
  const size_t capacity = rings::capacity_for(3);
  const auto store = make_memory_store();
  const shm::Arena heap(size_t{1} << 20);
  std::vector<UniqueFd> fds;
  std::vector<std::shared_ptr<shm::Mapping>> inboxes;
  for (int rank = 0; rank < 2; ++rank) {
    fds.push_back(shm::create_memfd("test-inbox", rings::inbox_bytes(3, capacity)));
    inboxes.push_back(shm::map_memfd(fds.back().get()));
    auto* const header = new (inboxes.back()->data()) InboxHeader;
    header->magic += static_cast<uint64_t>(rank);  // rank 1's is wrong
    header->workers = 3;
    header->capacity = capacity;
    for (int from = 0; from < 3; ++from) new (inboxes.back()->data() + rings::ring_at(from, capacity)) RingControl;
  }
  std::vector<std::thread> others;
  for (int rank = 0; rank < 2; ++rank)
    others.emplace_back([&, rank] {
      shm::exchange(*store, "test", rank, 3, {fds[static_cast<size_t>(rank)].get(), heap.fd()}, in_time());
    });
  Recorder receiver;
  EXPECT_THROW(Whole(2, 3, store, receiver, {}), Mismatch);
  for (auto& other : others) other.join();
  const auto* const ring = reinterpret_cast<RingControl*>(inboxes[0]->data() + rings::ring_at(2, capacity));
  EXPECT_EQ(ring->closed, 1U);
}

TEST(ShmByHand, ABrokenTailIsItsEnd) {
  const size_t capacity = transport::shm_rings::capacity_for(2);
  for (const uint64_t tail : {uint64_t{8}, uint64_t{capacity + 48}, ~uint64_t{0} - 15, uint64_t{16}}) {
    SCOPED_TRACE(tail);
    ShmByHand peer({});
    peer.write(record_of({.kind = RecordKind::kMessage, .body = 2}, {}, 16));
    EXPECT_EQ(peer.receiver.take(1)[0].body, "xx");
    peer.publish(tail);  // 16: before what was read
    EXPECT_THAT(peer.receiver.cause(1), testing::HasSubstr("wrote outside of its ring"));
  }
}

}  // namespace
}  // namespace muster::test
