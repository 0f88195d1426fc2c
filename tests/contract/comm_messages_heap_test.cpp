// Large messages from and to tensors on a World's heap: those by reference, those that a sender writes to a receive
// that waits, and what happens to their memory when the sender or the receiver gives up.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <chrono>
#include <string>
#include <vector>

#include "muster/comm/collectives.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

class HeapMessages : public CommContract {
 protected:
  static at::Tensor number(int64_t value) { return at::full({1}, value, at::kLong); }
  static void say(World& world, const std::string& key) { world.store().set(key, "1"); }
  static void hear(World& world, const std::string& key) { world.store().get(key, patience()); }
};
MUSTER_COMM_CONTRACT(HeapMessages);

// On one host, such messages go by reference: they are copied once, from the sender's heap.
TEST_P(HeapMessages, LargeOnesOnTheHeap) {
  constexpr int64_t kLarge = (int64_t{5} << 20) / 4 + 1;
  run(3, [](World& world) {
    const int n = world.world_size(), me = world.rank();
    const auto value = [](int from, int to, int turn) { return 100.0 * turn + 10.0 * from + to; };
    const auto all_are = [](const at::Tensor& t, double expected) { return (t == expected).all().item<bool>(); };
    const at::Tensor shared = world.heap().zeros({kLarge}), in = world.heap().zeros({kLarge});
    at::Tensor ordinary = at::zeros({kLarge});

    // One tensor to all ranks, this one included, beside small messages; received in another order than sent.
    for (int turn = 0; turn < 3; ++turn) {
      shared.fill_(value(me, 0, turn));
      std::vector<Work> sends;
      for (int peer = 0; peer < n; ++peer) {
        sends.push_back(isend(shared, peer, {.tag = 1}));
        sends.push_back(isend(number(turn), peer, {.tag = 2}));
      }
      for (int peer = 0; peer < n; ++peer) {
        at::Tensor small = number(-1);
        recv(small, peer, {.tag = 2});  // puts the large one aside
        EXPECT_EQ(small.item<int64_t>(), turn);
        const at::Tensor& large = turn == 1 ? in : ordinary;
        recv(large, peer, {.tag = 1});
        EXPECT_TRUE(all_are(large, value(peer, 0, turn))) << "from " << peer << ", turn " << turn;
      }
      for (auto& work : sends) work.wait();
    }

    // A ring of blocking calls: the receiver is there first, or the sender. The tensor changes after each send.
    for (int turn = 0; turn < 10; ++turn) {
      shared.fill_(value(me, (me + 1) % n, turn));
      const int from = (me + n - 1) % n;
      if (me == turn % n) {
        send(shared, (me + 1) % n);
        shared.fill_(-1);
        EXPECT_EQ(recv(in, turn % 2 ? from : kAnySource), from);
      } else {
        EXPECT_EQ(recv(in, turn % 2 ? from : kAnySource), from);
        send(shared, (me + 1) % n);
        shared.fill_(-1);
      }
      EXPECT_TRUE(all_are(in, value(from, me, turn))) << "turn " << turn;
    }
  });
}

// Receives are issued before anything is sent to them, and tensors of all ranks are on the heap or not.
TEST_P(HeapMessages, LargeOnesToReceivesThatWait) {
  constexpr int64_t kLarge = (int64_t{3} << 20) / 4 + 1;
  run(3, [](World& world) {
    const int n = world.world_size(), me = world.rank();
    for (const bool from_heap : {false, true})
      for (const bool to_heap : {false, true}) {
        SCOPED_TRACE(testing::Message() << from_heap << to_heap);
        const auto make = [&](bool heap) { return heap ? world.heap().zeros({kLarge}) : at::zeros({kLarge}); };
        std::vector<at::Tensor> in, out;
        std::vector<Work> works;
        for (int peer = 0; peer < n; ++peer)
          for (const int tag : {0, 1}) {
            in.push_back(make(to_heap));
            works.push_back(irecv(in.back(), peer, {.tag = tag}));
          }
        barrier();
        for (const int tag : {1, 0})
          for (int peer = 0; peer < n; ++peer) {
            out.push_back(make(from_heap).fill_(100.0 * tag + 10.0 * me + peer));
            works.push_back(isend(out.back(), peer, {.tag = tag}));
          }
        for (auto& work : works) work.wait();
        for (int peer = 0; peer < n; ++peer)
          for (const int tag : {0, 1})
            EXPECT_TRUE((in[static_cast<size_t>(2 * peer + tag)] == 100.0 * tag + 10.0 * peer + me).all().item<bool>())
                << "from " << peer << ", tag " << tag;
        barrier();
      }
  });
}

// The sender gives up before its receiver comes. The receiver must not take what the tensor holds by then.
TEST_P(HeapMessages, ALargeOneOnTheHeapWhoseSenderGivesUp) {
  constexpr int64_t kLarge = (int64_t{5} << 20) / 4;
  run(2, [](World& world) {
    const at::Tensor t = world.heap().zeros({kLarge});
    if (world.rank() == 0) {
      EXPECT_THROW(send(t, 1, {.timeout = std::chrono::milliseconds(300)}), TimeoutError);
      t.fill_(13);
      say(world, "gave up");
    } else {
      hear(world, "gave up");
      EXPECT_THROW(recv(t, 0), TimeoutError);
    }
  });
  run(2, [this](World& outer) {
    {
      World world = world_beside(outer);
      const World::Scope scope(world);
      const at::Tensor t = world.heap().zeros({kLarge});
      if (world.rank() == 0) {
        const Work pending = isend(t, 1);
      } else {
        hear(world, "left");
        EXPECT_THROW(recv(t, 0), Error);  // PeerLost, or what the leaving rank says
      }
    }
    if (outer.rank() == 0) say(outer, "left");
    barrier();
  });
}

// A receive that waits is given up. Its sender may know its tensor, and write to it later: no other tensor gets the
// memory.
TEST_P(HeapMessages, TheMemoryOfAReceiveThatFailedIsNotGivenAgain) {
  if (GetParam().backend != "shm") GTEST_SKIP() << "only there a sender writes to the tensor";
  constexpr int64_t kLarge = (int64_t{5} << 20) / 4;
  run(2, [](World& world) {
    const Group pair = world.new_group({0, 1});
    if (world.rank() == 0) {
      hear(world, "gave up");
      EXPECT_THROW(send(at::ones({kLarge}), 1), TimeoutError);
      return;
    }
    const auto place_of_next = [&] { return world.heap().zeros({kLarge}).const_data_ptr(); };
    const void* const place = place_of_next();
    EXPECT_EQ(place_of_next(), place);
    EXPECT_THROW(recv(world.heap().zeros({kLarge}), 0, {.timeout = std::chrono::milliseconds(100)}), TimeoutError);
    const void* const second = place_of_next();
    EXPECT_NE(second, place);
    // The same for one that is issued, in a group that has not failed.
    EXPECT_THROW(
        irecv(world.heap().zeros({kLarge}), 0, {.group = pair, .timeout = std::chrono::milliseconds(100)}).wait(),
        TimeoutError);
    EXPECT_NE(place_of_next(), second);
    say(world, "gave up");
  });
}

}  // namespace
}  // namespace muster::test
