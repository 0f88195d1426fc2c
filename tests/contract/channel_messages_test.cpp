// Messages in shared memory on plain bytes, without libtorch: beside collectives, with callbacks that wait, and when
// the group fails. channel_test.cpp says what ThreadSanitizer sees of it.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "support/channel_group.h"
#include "support/full_run.h"

namespace muster::comm::shm_backend {
namespace {

class ChannelMessagesTest : public ChannelTest {};

// Every rank sends to every other, alternately short messages, blocking ones and non-blocking ones, while collectives
// run in the same group.
TEST_P(ChannelMessagesTest, MessagesBesideCollectives) {
  for (const int n : {2, 3})
    run(n, [n](Rank& rank) {
      const int me = rank.channel.rank();
      const size_t ring = rank.channel.layout().ring / sizeof(float);
      std::thread collectives([&] {
        for (int number = 0; number < (test::full_run() ? 200 : 100); ++number) {
          auto values = contribution(me, 100, number);
          all_reduce(rank.channel, call_of(OpKind::kAllReduce, 100, bytes_of(values)));
          ASSERT_EQ(values, sum(n, 100, number));
        }
      });
      int number = 0;
      for (int round = 0; round < (test::full_run() ? 10 : 5); ++round)
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
              message->on_complete = [&](const Message& done, Message::Call) {
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

// The ring has no room for the end of the message before the receiver has read its beginning.
TEST_P(ChannelMessagesTest, ASmallMessageThatDoesNotGoOnIsReceivedLikeALargeOne) {
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
TEST_P(ChannelMessagesTest, AMessageIsFoundBehindOneThatWasFound) {
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

// Several callbacks at the same time, each in a thread of its own, wait for messages: one that was issued before, one
// that the callback issues, and one that another callback waits for, too.
TEST_P(ChannelMessagesTest, CallbacksWaitForMessages) {
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
        message->on_complete = [&into, callbacks = std::move(callbacks)](const Message& done, Message::Call call) {
          if (call == Message::Call::kCallbacks) {
            callbacks();
            return false;
          }
          EXPECT_FALSE(done.error);
          into.done = true;
          into.done.notify_all();
          return static_cast<bool>(callbacks);
        };
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
TEST_P(ChannelMessagesTest, PendingMessagesEndWithTheGroup) {
  run(3, [](Rank& rank) {
    const int me = rank.channel.rank();
    barrier(rank.channel, barrier_call());
    std::vector<float> never(10), neither(10), word(1);
    if (me == 0) {
      const auto pending = message_of(OpKind::kRecv, 2, 5, never);
      std::atomic<bool> failed{false};
      pending->on_complete = [&](const Message& done, Message::Call) {
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

INSTANTIATE_TEST_SUITE_P(Shm, ChannelMessagesTest, testing::ValuesIn(kWaitings),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace muster::comm::shm_backend
