// The lock-free code of shared memory on plain bytes, without libtorch: collectives in every tier, messages, failures.
// The ranks are threads of one process, so ThreadSanitizer sees every access to memory that two of them share.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "comm/backends/shm/collectives.h"
#include "comm/backends/shm/messages.h"
#include "comm/backends/shm/take.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "shm/arena.h"
#include "shm/mapping.h"
#include "support/patience.h"

namespace muster::comm::shm_backend {
namespace {

using test::patience;

// How ranks wait: kSleeps goes to the futex immediately; kSpins looks for its peers first.
struct Waiting {
  const char* name;
  std::chrono::nanoseconds spin;
};
void PrintTo(const Waiting& waiting, std::ostream* out) { *out << waiting.name; }
constexpr Waiting kWaitings[] = {{"sleeps", {}}, {"spins", shm::kSpin}};

// One rank: its part of the group, its messages, and memory that all ranks map.
struct Rank {
  Rank(Store& store, const std::string& prefix, int rank, int size, ChannelOptions options,
       const std::shared_ptr<shm::PeerWatch>& watch)
      : channel(store, prefix, rank, size, std::move(options), watch, patience()), messages(channel) {}
  ~Rank() {
    channel.leave();
    messages.stop();
  }

  Channel channel;
  Messages messages;
};

class ChannelTest : public testing::TestWithParam<Waiting> {
 protected:
  static constexpr size_t kHeap = size_t{4} << 20;

  // Runs body(rank) in n threads. If a body throws, the test fails.
  template <typename Body>
  void run(int n, Body body) {
    const auto store = make_memory_store();
    const auto watch = std::make_shared<shm::PeerWatch>();
    ChannelOptions options{.spin = GetParam().spin};
    std::vector<UniqueFd> fds;
    for (int r = 0; r < n; ++r) {
      fds.push_back(shm::create_memfd("heap", kHeap));
      options.heaps.push_back(shm::map_memfd(fds.back().get()));
    }
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r)
      threads.emplace_back([&, r] {
        try {
          Rank rank(*store, "group", r, n, options, watch);
          body(rank);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << r << ": " << error.what();
        }
      });
    for (auto& thread : threads) thread.join();
  }
};

// Element i of rank r's contribution to operation `number`. Sums of few of them are exact.
float value(int rank, size_t i, int number) {
  return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13 + static_cast<size_t>(number)) % 1001);
}
std::vector<float> contribution(int rank, size_t count, int number) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = value(rank, i, number);
  return values;
}
std::vector<float> sum(int ranks, size_t count, int number) {
  std::vector<float> values(count);
  for (int r = 0; r < ranks; ++r)
    for (size_t i = 0; i < count; ++i) values[i] += value(r, i, number);
  return values;
}

Bytes bytes_of(std::vector<float>& values) { return reinterpret_cast<Bytes>(values.data()); }

Call call_of(OpKind kind, size_t count, Bytes data, int root = 0) {
  Call call;
  call.kind = kind;
  call.root = root;
  call.count = count;
  call.item = sizeof(float);
  call.dtype = static_cast<uint8_t>(c10::ScalarType::Float);
  call.kernel = reduces(kind) ? reduce_kernel(c10::ScalarType::Float, ReduceOp::SUM) : nullptr;
  call.deadline = patience();
  call.data = data;
  return call;
}

Call barrier_call() { return call_of(OpKind::kBarrier, 0, nullptr); }

// Sizes on both sides of every border between tiers, and a pipeline that uses each of its buffers twice.
std::vector<size_t> counts(int n) {
  const Layout layout(n);
  const size_t turn = layout.turn_bytes() / sizeof(float), slot = kSlotPayload / sizeof(float);
  return {1, 77, 5, 78, slot, slot + 1, layout.early / sizeof(float) + 1, turn - 1, (2 * kTurnBuffers + 1) * turn + 5};
}

TEST_P(ChannelTest, ReducesInEveryTier) {
  for (const int n : {1, 2, 3, 4})
    run(n, [n](Rank& rank) {
      Channel& channel = rank.channel;
      const int me = channel.rank();
      int number = 0;
      for (const size_t count : counts(n)) {
        ++number;
        auto values = contribution(me, count, number);
        all_reduce(channel, call_of(OpKind::kAllReduce, count, bytes_of(values)));
        ASSERT_EQ(values, sum(n, count, number)) << "all_reduce of " << count;

        const int root = number % n;
        values = contribution(me, count, ++number);
        all_reduce(channel, call_of(OpKind::kReduce, count, bytes_of(values), root));
        ASSERT_EQ(values, me == root ? sum(n, count, number) : contribution(me, count, number))
            << "reduce of " << count;

        std::vector<float> whole = contribution(me, count * static_cast<size_t>(n), ++number), part(count);
        std::vector<ConstBytes> inputs;
        for (int r = 0; r < n; ++r) inputs.push_back(bytes_of(whole) + static_cast<size_t>(r) * count * sizeof(float));
        Call call = call_of(OpKind::kReduceScatter, count, bytes_of(part));
        call.inputs = inputs;
        reduce_scatter(channel, call);
        const auto expected = sum(n, whole.size(), number);
        ASSERT_TRUE(std::equal(part.begin(), part.end(), expected.begin() + me * static_cast<ptrdiff_t>(count)))
            << "reduce_scatter of " << count;
      }
    });
}

// Tensors on the heap are reduced in place, by all ranks in each other's memory.
TEST_P(ChannelTest, ReducesInPlaceOnTheHeaps) {
  for (const int n : {2, 3, 4})
    run(n, [n](Rank& rank) {
      Channel& channel = rank.channel;
      for (int number = 0; number < 40; ++number) {
        const size_t count = 20'000 + static_cast<size_t>(number), offset = 4096 * static_cast<size_t>(number % 5);
        Bytes const data = channel.heap(channel.rank()) + offset;
        const auto mine = contribution(channel.rank(), count, number);
        std::memcpy(data, mine.data(), count * sizeof(float));
        Call call = call_of(OpKind::kAllReduce, count, data);
        call.heap_offset = offset;
        all_reduce(channel, call);
        const auto expected = sum(n, count, number);
        ASSERT_EQ(std::memcmp(data, expected.data(), count * sizeof(float)), 0) << "all_reduce " << number;
      }
    });
}

TEST_P(ChannelTest, MovesInEveryTier) {
  for (const int n : {1, 2, 3, 4})
    run(n, [n](Rank& rank) {
      Channel& channel = rank.channel;
      const int me = channel.rank();
      int number = 0;
      for (const size_t count : counts(n)) {
        const int root = ++number % n;
        const size_t bytes = count * sizeof(float);
        auto values = contribution(me, count, number);
        broadcast(channel, call_of(OpKind::kBroadcast, count, bytes_of(values), root));
        ASSERT_EQ(values, contribution(root, count, number)) << "broadcast of " << count;

        auto mine = contribution(me, count, ++number);
        std::vector<std::vector<float>> parts(static_cast<size_t>(n), std::vector<float>(count));
        std::vector<Bytes> outputs;
        for (auto& part : parts) outputs.push_back(bytes_of(part));
        Call call = call_of(OpKind::kAllGather, count, bytes_of(mine));
        call.outputs = outputs;
        all_gather(channel, call);
        for (int r = 0; r < n; ++r)
          ASSERT_EQ(parts[static_cast<size_t>(r)], contribution(r, count, number)) << "all_gather of " << count;

        ++number;
        std::vector<float> sent = contribution(me, count * static_cast<size_t>(n), number), got(sent.size());
        std::vector<ConstBytes> inputs;
        outputs.clear();
        for (size_t r = 0; r < static_cast<size_t>(n); ++r) {
          inputs.push_back(bytes_of(sent) + r * bytes);
          outputs.push_back(bytes_of(got) + r * bytes);
        }
        const std::vector<uint64_t> sizes(static_cast<size_t>(n), bytes);
        call = call_of(OpKind::kAllToAll, 0, nullptr);
        call.inputs = inputs;
        call.outputs = outputs;
        call.send = call.receive = sizes;
        all_to_all(channel, call);
        for (int r = 0; r < n; ++r)
          for (size_t i = 0; i < count; ++i)
            ASSERT_EQ(got[static_cast<size_t>(r) * count + i], value(r, static_cast<size_t>(me) * count + i, number))
                << "all_to_all of " << count;
        barrier(channel, barrier_call());
      }
    });
}

constexpr auto kLong = std::chrono::minutes(10);  // only a hang can reach it

std::shared_ptr<Message> message_of(OpKind op, int peer, int tag, std::vector<float>& values) {
  auto message = std::make_shared<Message>();
  message->op = op;
  message->peer = peer;
  message->header = {
      .bytes = values.size() * sizeof(float), .tag = tag, .dtype = static_cast<uint8_t>(c10::ScalarType::Float)};
  message->data = bytes_of(values);
  message->deadline = patience();
  return message;
}

// Every rank sends to every other, alternately short messages, blocking ones and non-blocking ones, while collectives
// run in the same group.
TEST_P(ChannelTest, MessagesBesideCollectives) {
  for (const int n : {2, 3})
    run(n, [n](Rank& rank) {
      const int me = rank.channel.rank();
      const size_t ring = rank.channel.layout().ring / sizeof(float);
      std::thread collectives([&] {
        for (int number = 0; number < 200; ++number) {
          auto values = contribution(me, 100, number);
          all_reduce(rank.channel, call_of(OpKind::kAllReduce, 100, bytes_of(values)));
          ASSERT_EQ(values, sum(n, 100, number));
        }
      });
      int number = 0;
      for (int round = 0; round < 10; ++round)
        for (const size_t count : {size_t{0}, size_t{3}, size_t{1000}, ring - 4, 3 * ring + 1}) {
          ++number;
          std::vector<std::vector<float>> sent(static_cast<size_t>(n)), got(static_cast<size_t>(n));
          std::vector<std::shared_ptr<Message>> pending;
          std::atomic<size_t> completed{0};
          for (int peer = 0; peer < n; ++peer) {
            if (peer == me) continue;
            auto& out = sent[static_cast<size_t>(peer)] = contribution(me * n + peer, count, number);
            auto& in = got[static_cast<size_t>(peer)] = std::vector<float>(count);
            for (auto& message :
                 {message_of(OpKind::kRecv, peer, number, in), message_of(OpKind::kSend, peer, number, out)}) {
              message->on_complete = [&](const Message& done) {
                EXPECT_FALSE(done.error);
                ++completed;
                completed.notify_one();
                return false;
              };
              rank.messages.submit(message);
              pending.push_back(message);
            }
          }
          for (size_t seen = completed; seen < pending.size(); seen = completed) completed.wait(seen);
          for (int peer = 0; peer < n; ++peer) {
            if (peer == me) continue;
            ASSERT_EQ(got[static_cast<size_t>(peer)], contribution(peer * n + me, count, number))
                << count << " elements";
          }

          // Around a ring of ranks, blocking: even ranks send first.
          std::vector<float> out = contribution(me, count, number), in(count);
          const int next = (me + 1) % n, previous = (me + n - 1) % n;
          const auto send = [&] {
            const MessageHeader header{.bytes = count * sizeof(float), .tag = -number};
            if (header.bytes > Messages::kSmall || !rank.messages.send_now(next, header, bytes_of(out))) {
              const auto message = message_of(OpKind::kSend, next, -number, out);
              message->header = header;
              rank.messages.run(message);
            }
          };
          const auto receive = [&] {
            const MessageHeader header{.bytes = count * sizeof(float), .tag = -number};
            if (header.bytes > Messages::kSmall || !rank.messages.receive_now(previous, header, bytes_of(in), kLong)) {
              const auto message = message_of(OpKind::kRecv, previous, -number, in);
              message->header = header;
              rank.messages.run(message);
            }
          };
          if (me % 2 == 0) {
            send();
            receive();
          } else {
            receive();
            send();
          }
          ASSERT_EQ(in, contribution(previous, count, number));
        }
      collectives.join();
    });
}

// The copy is whole, and writes only one word per line of what it reads: the same again, or 0.
TEST(Take, CopiesAnyBytesAndLeavesWhatItMust) {
  constexpr size_t kRoom = 4 << 10;
  std::vector<std::byte> from(kRoom + kCacheLine), to(kRoom + 2 * kCacheLine);
  const auto begin_of_line = [](std::vector<std::byte>& memory) {
    return memory.data() + (kCacheLine - reinterpret_cast<uintptr_t>(memory.data()) % kCacheLine) % kCacheLine;
  };
  std::byte *const lines = begin_of_line(from), *const out = begin_of_line(to);
  const auto fill = [&] {
    for (size_t i = 0; i < kRoom; ++i) lines[i] = static_cast<std::byte>(i * 7 + i / 251 + 1);
    std::fill(to.begin(), to.end(), std::byte{0xaa});
  };
  for (const size_t bytes : {0, 1, 8, 63, 64, 65, 128, 200, 1000, 4000})
    for (const size_t offset : {0, 1, 8, 63})
      for (const bool stream : {false, true}) {
        SCOPED_TRACE(testing::Message() << bytes << " bytes at " << offset << (stream ? ", streamed" : ""));
        const auto is_copied = [&](const std::byte* source) {
          return std::equal(source, source + bytes, out + offset) &&
                 std::all_of(out + offset + bytes, to.data() + to.size(),
                             [](std::byte b) { return b == std::byte{0xaa}; });
        };
        fill();
        const std::vector<std::byte> before(lines, lines + kRoom);
        take_bytes(out + offset, lines + 32 - offset % 32, bytes);
        EXPECT_TRUE(is_copied(before.data() + 32 - offset % 32));
        EXPECT_TRUE(std::equal(before.begin(), before.end(), lines));

        fill();
        look_at_bytes(out + offset, lines, bytes, stream);
        EXPECT_TRUE(is_copied(before.data()));
        EXPECT_TRUE(std::equal(before.begin(), before.end(), lines));

        fill();
        take_and_clear(out + offset, lines, bytes, stream);
        EXPECT_TRUE(is_copied(before.data()));
        for (size_t at = 0; at < kRoom; at += sizeof(uint64_t)) {
          const bool cleared = at % kCacheLine == 0 && at < bytes;
          EXPECT_TRUE(cleared ? std::all_of(lines + at, lines + at + 8, [](std::byte b) { return b == std::byte{0}; })
                              : std::equal(lines + at, lines + at + 8, before.data() + at))
              << at;
        }
      }
}

// The ring has no room for the end of the message before the receiver has read its beginning.
TEST_P(ChannelTest, ASmallMessageThatDoesNotGoOnIsReceivedLikeALargeOne) {
  run(5, [](Rank& rank) {
    constexpr size_t kCount = Messages::kSmall / sizeof(float);
    ASSERT_GT(Messages::kSmall + kRecordLine, rank.channel.layout().ring);
    const int me = rank.channel.rank();
    std::vector<float> data = contribution(me, kCount, 1);
    const MessageHeader header{.bytes = Messages::kSmall, .tag = 3};
    const auto sent = message_of(OpKind::kSend, 1, 3, data);
    sent->header = header;
    if (me == 0) {
      EXPECT_FALSE(rank.messages.send_now(1, header, bytes_of(data)));
      rank.messages.submit(sent);
    }
    barrier(rank.channel, barrier_call());
    if (me == 1) {
      EXPECT_TRUE(rank.messages.receive_now(0, header, bytes_of(data), kLong));
      EXPECT_EQ(data, contribution(0, kCount, 1));
    }
    barrier(rank.channel, barrier_call());
  });
}

// find() reads the header of a message and leaves the message where it is. A message behind it is found all the same.
TEST_P(ChannelTest, AMessageIsFoundBehindOneThatWasFound) {
  run(2, [](Rank& rank) {
    std::vector<float> first = contribution(0, 5, 1), second = contribution(0, 50'000, 2);
    const auto message = [&](OpKind op, int tag, std::vector<float>& data) {
      auto made = message_of(op, 1 - rank.channel.rank(), tag, data);
      made->header = {.bytes = data.size() * sizeof(float), .tag = tag};
      return made;
    };
    if (rank.channel.rank() == 0) {
      rank.messages.submit(message(OpKind::kSend, 1, first));
      rank.messages.submit(message(OpKind::kSend, 2, second));
    }
    barrier(rank.channel, barrier_call());
    if (rank.channel.rank() == 1) {
      EXPECT_EQ(rank.messages.find(1, 0), 0);
      EXPECT_EQ(rank.messages.find(1, 0), 0) << "it is still there";
      EXPECT_EQ(rank.messages.find(2, 0), 0);
      std::vector<float> got(second.size());
      rank.messages.run(message(OpKind::kRecv, 2, got));
      EXPECT_EQ(got, second);
      got.resize(first.size());
      rank.messages.run(message(OpKind::kRecv, 1, got));
      EXPECT_EQ(got, first);
    }
    barrier(rank.channel, barrier_call());
  });
}

// --- failures ---

// Rank 1 is lost while the others are at work.
TEST_P(ChannelTest, EverybodyLearnsOfALostRank) {
  for (const int n : {2, 4})
    run(n, [](Rank& rank) {
      for (int number = 0; number < 20; ++number) barrier(rank.channel, barrier_call());
      if (rank.channel.rank() == 1) return rank.channel.lose(1, "rank 1 died");
      try {
        for (;;) {
          auto values = contribution(rank.channel.rank(), 50'000, 0);
          all_reduce(rank.channel, call_of(OpKind::kAllReduce, values.size(), bytes_of(values)));
        }
      } catch (const PeerLost& lost) {
        EXPECT_EQ(lost.rank(), 1);
      }
    });
}

TEST_P(ChannelTest, ARankThatLeavesIsNamed) {
  for (const int n : {2, 3})
    run(n, [](Rank& rank) {
      barrier(rank.channel, barrier_call());
      if (rank.channel.rank() == 1) return rank.channel.leave();
      try {
        barrier(rank.channel, barrier_call());
        ADD_FAILURE() << "a barrier without rank 1";
      } catch (const PeerLost& lost) {
        EXPECT_EQ(lost.rank(), 1);
      }
    });
}

TEST_P(ChannelTest, AMismatchIsTheSameErrorOnAllRanks) {
  run(3, [](Rank& rank) {
    auto values = contribution(rank.channel.rank(), 100, 0);
    try {
      all_reduce(rank.channel, call_of(OpKind::kAllReduce, rank.channel.rank() == 2 ? 99 : 100, bytes_of(values)));
      ADD_FAILURE() << "no error";
    } catch (const Mismatch& error) {
      EXPECT_NE(std::string(error.what()).find("all_reduce of 99 x Float"), std::string::npos) << error.what();
    }
  });
}

// Several callbacks at the same time, each in a thread of its own, wait for messages: one that was issued before, one
// that the callback issues, and one that another callback waits for, too.
TEST_P(ChannelTest, CallbacksWaitForMessages) {
  constexpr int kCallbacks = 4, kRounds = 20, kEarly = 100, kLate = 200, kInCallback = 300, kGo = 400;
  run(2, [](Rank& rank) {
    for (int round = 0; round < kRounds; ++round) {
      std::vector<float> word(1, 7);
      const int base = 1000 * round;
      if (rank.channel.rank() == 1) {
        rank.messages.run(message_of(OpKind::kRecv, 0, base + kGo, word));
        for (int i = 0; i < kCallbacks; ++i) rank.messages.run(message_of(OpKind::kSend, 0, base + i, word));
        for (int i = 0; i < kCallbacks; ++i)
          rank.messages.run(message_of(OpKind::kRecv, 0, base + kInCallback + i, word));
        for (int i = 0; i < kCallbacks; ++i)
          for (const int kind : {kLate, kEarly}) rank.messages.run(message_of(OpKind::kSend, 0, base + kind + i, word));
        continue;
      }
      struct Received {
        std::vector<float> data = std::vector<float>(1);
        std::atomic<bool> done{false};
      };
      std::vector<Received> first(kCallbacks), early(kCallbacks), late(kCallbacks);
      std::atomic<int> over{0};
      const auto receive = [&](Received& into, int tag, std::function<void()> callbacks) {
        const auto message = message_of(OpKind::kRecv, 1, base + tag, into.data);
        message->on_complete = [&into, calls = static_cast<bool>(callbacks)](const Message& done) {
          EXPECT_FALSE(done.error);
          into.done = true;
          into.done.notify_all();
          return calls;
        };
        message->callbacks = std::move(callbacks);
        rank.messages.submit(message);
      };
      for (int i = 0; i < kCallbacks; ++i) receive(early[static_cast<size_t>(i)], kEarly + i, nullptr);
      for (int i = 0; i < kCallbacks; ++i)
        receive(first[static_cast<size_t>(i)], i, [&, i] {
          std::vector<float> in_callback(1, 7);
          rank.messages.run(message_of(OpKind::kSend, 1, base + kInCallback + i, in_callback));
          receive(late[static_cast<size_t>(i)], kLate + i, nullptr);
          late[static_cast<size_t>(i)].done.wait(false);
          for (auto& each : early) each.done.wait(false);
          ++over;
          over.notify_all();
        });
      rank.messages.run(message_of(OpKind::kSend, 1, base + kGo, word));
      for (int seen = over; seen < kCallbacks; seen = over) over.wait(seen);
      for (const auto* const list : {&first, &early, &late})
        for (const auto& each : *list) ASSERT_EQ(each.data[0], 7);
    }
  });
}

// Messages that wait when the group fails end with its error, whichever thread waits for them.
TEST_P(ChannelTest, PendingMessagesEndWithTheGroup) {
  run(3, [](Rank& rank) {
    const int me = rank.channel.rank();
    barrier(rank.channel, barrier_call());
    std::vector<float> never(10), neither(10), word(1);
    if (me == 0) {
      const auto pending = message_of(OpKind::kRecv, 2, 5, never);
      std::atomic<bool> failed{false};
      pending->on_complete = [&](const Message& done) {
        EXPECT_TRUE(done.error);
        failed = true;
        failed.notify_all();
        return false;
      };
      rank.messages.submit(pending);
      rank.messages.run(message_of(OpKind::kSend, 1, 8, word));
      EXPECT_THROW(rank.messages.run(message_of(OpKind::kRecv, 1, 6, neither)), PeerLost);
      failed.wait(false);
    } else if (me == 1) {
      rank.messages.run(message_of(OpKind::kRecv, 0, 8, word));
      rank.channel.lose(1, "rank 1 died");
    } else {
      EXPECT_THROW(rank.messages.run(message_of(OpKind::kRecv, 1, 7, never)), PeerLost);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shm, ChannelTest, testing::ValuesIn(kWaitings),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace muster::comm::shm_backend
