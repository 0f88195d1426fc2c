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

#include "comm/backends/shm/message_sizes.h"
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

// Receives whose tensors are on the heap, one behind the other, of this many elements.
struct HeapReceives {
  HeapReceives(Rank& receiver, size_t elements) : rank(receiver), count(elements) {}

  void submit(int peer, int tag) {
    std::vector<float> none;
    const auto message = message_of(OpKind::kRecv, peer, tag, none);
    message->header.bytes = count * sizeof(float);
    message->header.place = messages.size() * whole_lines(message->header.bytes);
    message->data = rank.channel.heap(rank.channel.rank()) + message->header.place;
    message->on_complete = [this](const Message& done, Message::Call) {
      EXPECT_FALSE(done.error);
      ++completed;
      completed.notify_all();
      return false;
    };
    messages.push_back(message);
    rank.messages.submit(message);
  }
  void await(size_t number) {
    for (size_t seen = completed; seen < number; seen = completed) completed.wait(seen);
  }
  std::vector<float> received(size_t index) const {
    std::vector<float> values(count);
    std::memcpy(values.data(), messages.at(index)->data, count * sizeof(float));
    return values;
  }

  Rank& rank;
  const size_t count;
  std::vector<std::shared_ptr<Message>> messages;
  std::atomic<size_t> completed{0};
};

// Only the line of such a message goes through the ring. The next receive is posted when the first one has its message.
TEST_P(ChannelMessagesTest, TheSenderWritesToAPostedReceive) {
  constexpr size_t kCount = kLeastByReference / sizeof(float) + 3, kMessages = 3;
  run(2, [](Rank& rank) {
    HeapReceives receives(rank, kCount);
    if (rank.channel.rank() == 1)
      for (size_t number = 0; number < kMessages; ++number) receives.submit(0, 5);
    for (size_t number = 0; number < kMessages; ++number) {
      if (rank.channel.rank() == 1) {
        EXPECT_TRUE(receives.messages[number]->posted);
        if (number + 1 < kMessages) {
          EXPECT_FALSE(receives.messages[number + 1]->posted);
        }
      }
      barrier(rank.channel, barrier_call());
      std::vector<float> data = contribution(0, kCount, static_cast<int>(number));
      if (rank.channel.rank() == 0) {
        rank.messages.run(message_of(OpKind::kSend, 1, 5, data));
        const auto& ring = *reinterpret_cast<const RingControl*>(rank.channel.ring(0, 1));
        EXPECT_EQ(ring.written.load(), (number + 1) * kRecordLine);
      } else {
        receives.await(number + 1);
        EXPECT_EQ(receives.received(number), data);
      }
    }
  });
}

// What is not posted: a receive behind another one of its source, behind one from any source, or of a message whose
// turn it is not. All get their own messages.
TEST_P(ChannelMessagesTest, AMessageThatIsNotForThePostedReceiveGoesThroughTheRing) {
  constexpr size_t kCount = kLeastByReference / sizeof(float);
  run(2, [](Rank& rank) {
    HeapReceives receives(rank, kCount);
    const int tags[] = {2, 1, 1, 3};  // as sent: the posted receive is the one with tag 1
    if (rank.channel.rank() == 1) {
      receives.submit(0, 1);
      receives.submit(kAnySource, 1);
      receives.submit(0, 2);
      receives.submit(0, 3);
      EXPECT_TRUE(receives.messages[0]->posted);
      for (size_t i = 1; i < 4; ++i) EXPECT_FALSE(receives.messages[i]->posted) << i;
    }
    barrier(rank.channel, barrier_call());
    if (rank.channel.rank() == 0) {
      const auto& ring = *reinterpret_cast<const RingControl*>(rank.channel.ring(0, 1));
      for (int number = 0; number < 4; ++number) {
        std::vector<float> data = contribution(0, kCount, number);
        rank.messages.run(message_of(OpKind::kSend, 1, tags[number], data));
        if (number == 0) {
          EXPECT_GT(ring.written.load(), kLeastByReference);
        }
      }
    } else {
      receives.await(4);
      const int expected[] = {1, 2, 0, 3};
      for (size_t i = 0; i < 4; ++i) EXPECT_EQ(receives.received(i), contribution(0, kCount, expected[i])) << i;
    }
    barrier(rank.channel, barrier_call());
  });
}

// Many messages of sizes on both sides of the border, with two tags, from heaps and elsewhere, to receives that are
// posted early or late. Those between heaps are copied by both ranks.
TEST_P(ChannelMessagesTest, PostedReceivesAmongOthers) {
  constexpr int kRounds = 4;
  const int kMessages = test::full_run() ? 4 : 2;
  run(3, [=](Rank& rank) {
    const int me = rank.channel.rank(), n = 3;
    for (int round = 0; round < kRounds; ++round) {
      const size_t counts[] = {kLeastByReference, kLeastByReference - 4, kLeastByReference + 4,
                               kLeastByReference + 3 * kPieceByReference / 2};
      const size_t count = counts[round] / sizeof(float);
      HeapReceives receives(rank, count);
      std::vector<std::vector<float>> data;
      std::vector<std::shared_ptr<Message>> sends;
      std::atomic<int> sent{0};
      const auto send = [&](int peer, int number) {
        auto& values = data.emplace_back(contribution(me * n + peer, count, number));
        const auto message = message_of(OpKind::kSend, peer, number % 2, values);
        if ((number + peer) % 3 > 0) {  // from the heap, behind the receives' tensors
          message->header.place = kHeap / 2 + (data.size() - 1) * whole_lines(message->header.bytes);
          message->data = rank.channel.heap(me) + message->header.place;
          std::memcpy(message->data, values.data(), message->header.bytes);
        }
        message->on_complete = [&sent](const Message& done, Message::Call) {
          EXPECT_FALSE(done.error);
          ++sent;
          sent.notify_all();
          return false;
        };
        rank.messages.submit(message);
        sends.push_back(message);
      };
      data.reserve(static_cast<size_t>(n) * kMessages);
      // Each rank sends the messages 0, 1, … to each, itself included; and receives 1, 0, 3, 2 or 0, 1, 2, 3 from each.
      for (int number = 0; number < kMessages; ++number)
        for (int peer = 0; peer < n; ++peer) {
          if ((me + round) % 2 == 0) receives.submit(peer, (number + round) % 2);
          send(peer, number);
          if ((me + round) % 2 == 1) receives.submit(peer, (number + round) % 2);
        }
      receives.await(static_cast<size_t>(n) * kMessages);
      for (int seen = sent; seen < n * kMessages; seen = sent) sent.wait(seen);
      for (int number = 0; number < kMessages; ++number)
        for (int peer = 0; peer < n; ++peer) {
          const int expected = round % 2 == 0 ? number : number ^ 1;
          ASSERT_EQ(receives.received(static_cast<size_t>(number * n + peer)),
                    contribution(peer * n + me, count, expected))
              << "message " << expected << " from rank " << peer;
        }
      barrier(rank.channel, barrier_call());
    }
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
