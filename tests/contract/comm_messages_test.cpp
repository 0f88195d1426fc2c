// send and recv: tags, order, sizes, both directions, messages to oneself, and messages that do not fit their receive.

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <unistd.h>

#include <algorithm>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/pidfd.h"
#include "muster/comm/collectives.h"
#include "support/patience.h"
#include "support/patterns.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace muster::test {
namespace {

class Messages : public CommContract {
 protected:
  static at::Tensor number(int64_t value) { return at::full({1}, value, at::kLong); }
  static void say(World& world, const std::string& key) { world.store().set(key, "1"); }
  static void hear(World& world, const std::string& key) { world.store().get(key, patience()); }
};
MUSTER_COMM_CONTRACT(Messages);

// Sizes from 0 to more than a ring holds, of each kind of tensor, with the sender first or the receiver first.
TEST_P(Messages, EverySize) {
  run(2, [](World& world) {
    int64_t shift = 0;
    for (const int64_t bytes :
         {0, 1, 8, 31, 4096, 65'000, 65'512, 65'513, 65'536, 65'537, 200'003, 262'120, 262'121, 1 << 20, (4 << 20) + 3})
      for (const auto kind : kKinds) {
        ++shift;
        SCOPED_TRACE(testing::Message() << bytes << " bytes, " << to_string(kind));
        const at::Tensor flat = tile(table_of(at::kByte, world.rank()), shift, bytes);
        const TestTensor t(world, world.rank(), kind, flat);
        if (world.rank() == static_cast<int>(shift % 2)) {
          send(t, 1 - world.rank());
          EXPECT_EQ(difference(t, flat), "");
        } else {
          recv(t, 1 - world.rank());
          EXPECT_EQ(difference(t, table_of(at::kByte, 1 - world.rank()), shift), "");
        }
        EXPECT_TRUE(t.surroundings_intact());
      }
  });
}

// What is wrong with one of a batch is found before any of it is sent.
TEST_P(Messages, ABatchThatIsRefusedLeavesNoTrace) {
  run(2, [](World& world) {
    const at::Tensor a = at::zeros({3}), b = at::ones({3}), c = at::zeros({3});
    const bool has_limits = world.group().backend_name() != "shm";  // of tags
    if (world.rank() == 0) {
      if (has_limits) {
        EXPECT_THROW(batch_isend_irecv({{P2POp::kRecv, a, 1}, {P2POp::kSend, b, 1, {.tag = -1}}}), InvalidArgument);
      }
      EXPECT_THROW(batch_isend_irecv({{P2POp::kRecv, a, 1}, {P2POp::kSend, b, 99}}), InvalidArgument);
      recv(c, 1);
      EXPECT_TRUE(a.eq(0).all().item<bool>());
      EXPECT_TRUE(c.eq(7).all().item<bool>());
    } else {
      send(at::full({3}, 7, at::kFloat), 0);
    }
  });
}

TEST_P(Messages, ReceiverFirstAndSenderFirst) {
  run(2, [](World& world) {
    const at::Tensor large = at::ones({300'000});
    if (world.rank() == 0) {
      send(number(1), 1);  // buffered: no receive is posted yet
      Work first = isend(large, 1);
      say(world, "sent");
      hear(world, "waiting");
      send(number(2), 1, {.tag = 3});
      first.wait();
    } else {
      hear(world, "sent");
      at::Tensor n = number(0), t = at::zeros({300'000});
      recv(n, 0);
      EXPECT_EQ(n.item<int64_t>(), 1);
      Work early = irecv(n, 0, {.tag = 3});
      EXPECT_FALSE(early.is_completed());
      say(world, "waiting");
      recv(t, 0);
      early.wait();
      EXPECT_EQ(n.item<int64_t>(), 2);
      EXPECT_EQ(early.source_rank(), 0);
      EXPECT_TRUE((t == 1).all().item<bool>());
    }
  });
}

TEST_P(Messages, TagsInAnyOrder) {
  run(2, [](World& world) {
    constexpr int kTags = 40;
    const auto size_of = [](int tag) { return tag % 7 == 0 ? int64_t{50'000} : int64_t{tag + 1}; };
    if (world.rank() == 0) {
      std::vector<Work> sends;
      for (int round = 0; round < 2; ++round)
        for (int tag = 0; tag < kTags; ++tag)
          sends.push_back(isend(at::full({size_of(tag)}, 100.0 * round + tag), 1, {.tag = tag}));
      for (auto& work : sends) work.wait();
    } else {
      for (int round = 0; round < 2; ++round)  // messages with one tag come in the order sent
        for (int tag = kTags - 1; tag >= 0; --tag) {
          at::Tensor t = at::zeros({size_of(tag)});
          recv(t, 0, {.tag = tag});
          EXPECT_TRUE((t == 100.0 * round + tag).all().item<bool>()) << "tag " << tag << ", round " << round;
        }
    }
  });
}

TEST_P(Messages, WaitedForInReverse) {
  run(2, [](World& world) {
    constexpr int kMany = 20;
    const auto size_of = [](int i) { return i % 3 == 0 ? int64_t{60'000} : int64_t{1} + i; };
    std::vector<Work> works;
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < kMany; ++i) {
      tensors.push_back(world.rank() == 0 ? at::full({size_of(i)}, i, at::kFloat) : at::zeros({size_of(i)}));
      works.push_back(world.rank() == 0 ? isend(tensors.back(), 1) : irecv(tensors.back(), 0));
    }
    for (int i = kMany - 1; i >= 0; --i) {
      works[static_cast<size_t>(i)].wait();
      EXPECT_TRUE(tensors[static_cast<size_t>(i)].eq(i).all().item<bool>()) << i;
    }
  });
}

// A message's tensor may own an object of the user, whose destruction may do anything. Here it sends another message.
TEST_P(Messages, WhatTheTensorOwnsMaySendWhenItIsReleased) {
  run(2, [](World& world) {
    constexpr int64_t kCount = 300'000;
    if (world.rank() == 0) {
      std::promise<Work> last_words;
      auto data = std::make_unique<std::vector<float>>(kCount, 1.0f);
      {
        const World* const current = &world;
        auto* const owned = data.release();
        at::Tensor t = at::from_blob(
            owned->data(), {kCount},
            [owned, current, &last_words](void*) {
              delete owned;
              last_words.set_value(isend(number(7), 1, {.tag = 2, .group = current->group()}));
            },
            at::kFloat);
        isend(std::move(t), 1, {.tag = 1});  // the work is dropped, too
      }
      say(world, "forgotten");
      auto work = last_words.get_future();
      ASSERT_EQ(work.wait_until(patience().when()), std::future_status::ready);
      work.get().wait();
    } else {
      hear(world, "forgotten");
      at::Tensor t = at::zeros({kCount}), n = number(0);
      recv(t, 0, {.tag = 1});
      recv(n, 0, {.tag = 2});
      EXPECT_TRUE(t.eq(1).all().item<bool>());
      EXPECT_EQ(n.item<int64_t>(), 7);
    }
  });
}

// An asynchronous message moves although neither end calls a function of comm meanwhile.
TEST_P(Messages, MoveWhileBothEndsCompute) {
  run(2, [](World& world) {
    const at::Tensor t = world.rank() == 0 ? at::ones({2 << 20}) : at::zeros({2 << 20});
    Work work = world.rank() == 0 ? isend(t, 1) : irecv(t, 0);
    const auto deadline = patience();
    while (!work.is_completed() && !deadline.passed()) std::this_thread::yield();
    EXPECT_TRUE(work.is_completed());
    work.wait();
    EXPECT_TRUE(t.eq(1).all().item<bool>());
  });
}

TEST_P(Messages, ManySmallOnes) {
  run(3, [](World& world) {
    const int n = world.world_size(), me = world.rank();
    const int kMany = kSanitized || world.group().backend_name() != "shm" ? 1000 : 20'000;
    std::vector<Work> receives;
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 50; ++i) {
      tensors.push_back(number(-1));
      receives.push_back(irecv(tensors.back(), (me + 2) % n, {.tag = 1}));
    }
    for (int i = 0; i < kMany; ++i) {
      Work sending = isend(number(i), (me + 1) % n);
      at::Tensor t = number(-1);
      recv(t, (me + n - 1) % n);
      ASSERT_EQ(t.item<int64_t>(), i);
      sending.wait();
    }
    for (int i = 0; i < 50; ++i) send(number(i), (me + 1) % n, {.tag = 1});
    for (int i = 0; i < 50; ++i) {
      receives[static_cast<size_t>(i)].wait();
      EXPECT_EQ(tensors[static_cast<size_t>(i)].item<int64_t>(), i);
    }
  });
}

TEST_P(Messages, BothDirectionsAtOnce) {
  run(4, [](World& world) {
    constexpr int64_t kLarge = 500'000;
    const int n = world.world_size(), me = world.rank();
    std::vector<Work> works;
    std::vector<at::Tensor> in;
    for (int peer = 0; peer < n; ++peer) {  // including this rank
      in.push_back(at::zeros({kLarge}));
      works.push_back(isend(at::full({kLarge}, 10.0 * me + peer), peer));
    }
    for (int peer = n - 1; peer >= 0; --peer) works.push_back(irecv(in[static_cast<size_t>(peer)], peer));
    for (auto& work : works) work.wait();
    for (int peer = 0; peer < n; ++peer)
      EXPECT_TRUE((in[static_cast<size_t>(peer)] == 10.0 * peer + me).all().item<bool>()) << "from " << peer;
  });
}

// Two ranks both send first, and more than is buffered. Each waits for the other's receive, which another thread posts.
TEST_P(Messages, BlockingSendsInBothDirectionsWithReceivesInAnotherThread) {
  run(2, [](World& world) {
    constexpr int64_t kLarge = 300'000;
    at::Tensor in = at::zeros({kLarge});
    std::thread receiver([&] {
      const World::Scope scope(world);
      recv(in, 1 - world.rank());
    });
    send(at::full({kLarge}, 1.0 + world.rank()), 1 - world.rank());
    receiver.join();
    EXPECT_TRUE((in == 2.0 - world.rank()).all().item<bool>());
  });
}

TEST_P(Messages, ToOneself) {
  for (const int n : {1, 2})
    run(n, [](World& world) {
      const int me = world.rank();
      send(number(7), me);  // small: buffered
      at::Tensor t = number(0);
      recv(t, me);
      EXPECT_EQ(t.item<int64_t>(), 7);
      at::Tensor in = at::zeros({200'000});
      Work receive = irecv(in, me);
      send(at::ones({200'000}), me);
      receive.wait();
      EXPECT_TRUE((in == 1).all().item<bool>());
    });
}

// Messages and collectives do not block each other.
TEST_P(Messages, BesideCollectives) {
  run(2, [](World& world) {
    at::Tensor late = number(0), t = at::ones({30'000});
    Work receive = irecv(late, 1 - world.rank());
    for (int i = 0; i < 20; ++i) all_reduce(t, {.op = ReduceOp::MAX});
    EXPECT_FALSE(receive.is_completed());
    barrier();  // no rank sends before both have looked
    Work reduction;
    if (world.rank() == 0) {
      reduction = all_reduce_async(t, {.op = ReduceOp::MAX});
      send(number(1), 1);
      receive.wait();
    } else {
      receive.wait();
      reduction = all_reduce_async(t, {.op = ReduceOp::MAX});
      send(number(1), 0);
    }
    reduction.wait();
    EXPECT_EQ(late.item<int64_t>(), 1);
    barrier();
  });
}

// Messages that a rank sent before it left still arrive.
TEST_P(Messages, OutliveTheirSender) {
  run(2, [this](World& outer) {
    {
      World world = world_beside(outer);
      const World::Scope scope(world);
      if (world.rank() == 0) {
        for (int i = 0; i < 10; ++i) send(number(i), 1);
      } else {
        hear(world, "left");
        for (int i = 0; i < 10; ++i) {
          at::Tensor t = number(-1);
          recv(t, 0);
          EXPECT_EQ(t.item<int64_t>(), i);
        }
        try {
          recv(number(-1), 0);
          ADD_FAILURE() << "received from a rank that has left";
        } catch (const PeerLost& lost) {
          EXPECT_EQ(lost.rank(), 0);
          EXPECT_CONTAINS(lost.what(), "left");
        }
      }
    }
    if (outer.rank() == 0) say(outer, "left");
    barrier();
  });
}

// The other ranks go on when a rank has left and its process has ended.
TEST_P(Messages, OfOthersWhenARankHasEnded) {
  run(3, [this](World& world) {
    barrier();
    if (world.rank() == 2) {
      world.store().set("pid of 2", std::to_string(::getpid()));
      return;
    }
    const auto pid = static_cast<pid_t>(std::stol(world.store().get("pid of 2", patience())));
    if (GetParam().ranks == RanksAre::kProcesses) {
      const UniqueFd process = open_pidfd(pid);
      EXPECT_TRUE(!process || await_end(process, patience()));
    }
    constexpr int kMany = 100;
    for (int i = 1; world.rank() == 0 && i <= kMany; ++i) {
      send(number(i == kMany), 1);
      recv(number(0), 1);
    }
    for (at::Tensor last = number(0); world.rank() == 1 && last.item<int64_t>() == 0;) {
      recv(last, 0);
      send(last, 0);
    }
  });
}

TEST_P(Messages, AnotherSizeOrDtypeIsMismatch) {
  for (const bool dtype : {false, true})
    for (const bool receiver_first : {false, true})
      run(2, [=](World& world) {
        SCOPED_TRACE(testing::Message() << (dtype ? "dtype" : "size")
                                        << (receiver_first ? ", receiver first" : ", sender first"));
        if (world.rank() == 0) {
          if (receiver_first) hear(world, "waiting");
          send(at::ones({10}), 1, {.tag = 4});
          say(world, "sent");
          hear(world, "seen");  // the sender of a buffered message has gone on; its next call throws
          EXPECT_THROW(barrier(), Mismatch);
        } else {
          const at::Tensor t = dtype ? at::ones({10}, at::kInt) : at::ones({11});
          if (!receiver_first) hear(world, "sent");
          Work receive;
          const auto text = message_of<Mismatch>([&] {
            receive = irecv(t, 0, {.tag = 4});
            say(world, "waiting");
            receive.wait();
          });
          EXPECT_CONTAINS(text, "tag 4");
          EXPECT_CONTAINS(text, "Float");
          EXPECT_CONTAINS(text, dtype ? "Int" : "44 bytes");
          EXPECT_CONTAINS(text, "40 bytes");
          const auto first = text.find("(comm_messages_test.cpp:"), last = text.rfind("(comm_messages_test.cpp:");
          EXPECT_NE(first, last) << text;  // where both called
          say(world, "seen");
          EXPECT_THROW(recv(t, 0), Mismatch);
        }
      });
}

TEST_P(Messages, Timeouts) {
  run(2, [](World& world) {
    if (world.rank() == 0) {
      EXPECT_CONTAINS(message_of<TimeoutError>(
                          [&] { recv(at::ones({10}), 1, {.tag = 9, .timeout = std::chrono::milliseconds(300)}); }),
                      "recv of 10 x Float");
      say(world, "timed out");
    } else {
      hear(world, "timed out");
      EXPECT_CONTAINS(message_of<TimeoutError>([&] { send(at::ones({10}), 0); }), "timed out");
    }
  });
  run(2, [](World& world) {
    if (world.rank() == 0) {
      Work patient = isend(at::ones({100'000}), 1);
      // In the same queue, but with a shorter timeout.
      EXPECT_THROW(send(at::ones({100'000}), 1, {.timeout = std::chrono::milliseconds(300)}), TimeoutError);
      EXPECT_THROW(patient.wait(), TimeoutError);
      say(world, "timed out");
    } else {
      hear(world, "timed out");
    }
  });
}

}  // namespace
}  // namespace muster::test
