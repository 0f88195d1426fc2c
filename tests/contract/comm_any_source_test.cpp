// Receives from any source: order, tags, sizes, many senders, one that never stops, and the loss of a sender. On every
// backend; `hierarchical` looks for messages from this host and from the others (receive_queue.h).

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/text.h"
#include "muster/comm/collectives.h"
#include "support/forked.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using std::chrono::milliseconds;

at::Tensor number(int64_t value) { return at::full({1}, value, at::kLong); }

class AnySource : public CommContract {
 protected:
  static void say(World& world, const std::string& key) { world.store().set(key, "1"); }
  static void hear(World& world, const std::string& key) { world.store().get(key, patience()); }
};
MUSTER_COMM_CONTRACT(AnySource);

// Receives with one tag get messages in the order in which they were posted, whichever of them name their source.
TEST_P(AnySource, ReceivesKeepTheirOrder) {
  run(3, [](World& world) {
    if (world.rank() != 0) {
      for (int round = 0; round < 20; ++round) {
        hear(world, text("posted ", round));
        if (world.rank() == 2 - round % 2)
          for (int i = 0; i < 4; ++i) send(number(10 * round + i), 0, {.tag = 5});
      }
      return;
    }
    for (int round = 0; round < 20; ++round) {
      const int from = 2 - round % 2;  // a rank of this host, and one of another
      std::vector<at::Tensor> tensors(4);
      std::vector<Work> works;
      for (int i = 0; i < 4; ++i) {
        tensors[static_cast<size_t>(i)] = number(-1);
        works.push_back(irecv(tensors[static_cast<size_t>(i)], i % 2 == round / 2 % 2 ? kAnySource : from, {.tag = 5}));
      }
      for (const auto& work : works) EXPECT_FALSE(work.is_completed());
      say(world, text("posted ", round));
      for (size_t i = 4; i-- > 0;) {
        works[i].wait();
        EXPECT_EQ(works[i].source_rank(), from);
        EXPECT_EQ(tensors[i].item<int64_t>(), 10 * round + static_cast<int>(i)) << "round " << round;
      }
    }
  });
}

TEST_P(AnySource, WaitsWithoutHoldingUpAnythingElse) {
  run(3, [](World& world) {
    at::Tensor early = number(-1), later = number(-1);
    Work waiting, behind;
    if (world.rank() == 0) {
      waiting = irecv(early, kAnySource, {.tag = 8});
      behind = irecv(later, 1, {.tag = 8});
    }
    for (int i = 0; i < 5; ++i) {
      const at::Tensor t = number(world.rank());
      all_reduce(t);
      EXPECT_EQ(t.item<int64_t>(), 3);
      const int next = (world.rank() + 1) % 3, previous = (world.rank() + 2) % 3;
      const Work sending = isend(number(world.rank()), next, {.tag = 9});
      recv(t, previous, {.tag = 9});
      EXPECT_EQ(t.item<int64_t>(), previous);
      Work(sending).wait();
    }
    if (world.rank() == 0) {
      EXPECT_FALSE(waiting.is_completed());
      say(world, "now");
      waiting.wait();
      EXPECT_EQ(waiting.source_rank(), 2);
      EXPECT_EQ(early.item<int64_t>(), 2);
      EXPECT_FALSE(behind.is_completed());
    }
    hear(world, "now");
    if (world.rank() == 2) send(number(2), 0, {.tag = 8});
    barrier();
    if (world.rank() == 1) send(number(1), 0, {.tag = 8});
    if (world.rank() == 0) {
      behind.wait();
      EXPECT_EQ(later.item<int64_t>(), 1);
    }
    barrier();
  });
}

TEST_P(AnySource, WhoIsLateBehindAnotherIsTold) {
  run(2, [](World& world) {
    if (world.rank() == 0) {
      const Work waiting = irecv(number(-1), kAnySource, {.tag = 4, .timeout = 2 * kPatience});
      EXPECT_THROW(recv(number(-1), 1, {.tag = 4, .timeout = milliseconds(100)}), TimeoutError);
      say(world, "told");
    }
    hear(world, "told");
  });
}

// The messages of one sender and tag come complete and in their order, whatever other messages are on their way.
TEST_P(AnySource, ManySendersTagsAndSizes) {
  run(4, [](World& world) {
    constexpr int kTags = 3, kEach = 24;
    const auto size_of = [](int tag) { return std::array<int64_t, kTags>{3, 700, 90'000}[static_cast<size_t>(tag)]; };
    const int me = world.rank();
    if (me != 0) {
      std::vector<Work> works;
      std::vector<at::Tensor> kept;
      for (int i = 0; i < kEach; ++i)
        for (int step = 0; step < kTags; ++step) {
          const int tag = (i + step + me) % kTags;
          kept.push_back(at::full({size_of(tag)}, 1000.0 * me + i));
          works.push_back(isend(kept.back(), 0, {.tag = tag}));
        }
      for (auto& work : works) work.wait();
      barrier();
      return;
    }
    std::map<std::pair<int, int>, int> seen;  // by source and tag
    const auto check = [&](const at::Tensor& t, int source, int tag) {
      ASSERT_TRUE(source >= 1 && source <= 3) << source;
      const int i = seen[{source, tag}]++;
      EXPECT_TRUE(t.eq(1000.0 * source + i).all().item<bool>())
          << "message " << i << " with tag " << tag << " from " << source << " is " << t[0].item<double>();
    };
    for (int i = 0; i < 3 * kEach; i += 4)
      for (int tag = kTags - 1; tag >= 0; --tag) {
        // Four receives at the same time, each for the next message of its source. They are waited for in the order in
        // which they were posted.
        std::vector<at::Tensor> tensors;
        std::vector<Work> works;
        for (int k = 0; k < 3; ++k) {
          tensors.push_back(at::zeros({size_of(tag)}));
          works.push_back(irecv(tensors.back(), kAnySource, {.tag = tag}));
        }
        const at::Tensor last = at::zeros({size_of(tag)});
        const int source = recv(last, kAnySource, {.tag = tag});
        for (size_t k = 0; k < 3; ++k) {
          works[k].wait();
          check(tensors[k], works[k].source_rank(), tag);
        }
        check(last, source, tag);
      }
    for (const auto& [key, count] : seen) EXPECT_EQ(count, kEach) << "from " << key.first << ", tag " << key.second;
    EXPECT_EQ(seen.size(), 9u);
    barrier();
  });
}

// A rank whose messages are always there does not keep this rank from receiving the others'.
TEST_P(AnySource, NobodyIsStarved) {
  for (const int flooder : {1, 2, 3})
    run(4, [flooder](World& world) {
      constexpr int kMany = 300;
      const int me = world.rank();
      const bool by_turns = world.group().backend_name() == "shm" || world.group().backend_name() == "hierarchical";
      const auto marks = [&](int rank) {  // whether `rank` sends a second message that tells that the first has come
        return world.group().backend_name() == "hierarchical" && rank == 3 && rank != flooder;
      };
      if (me != 0) {
        for (int i = 0; i < (me == flooder ? kMany : 1); ++i) send(number(i), 0);  // small ones: sent immediately
        if (marks(me)) send(number(0), 0, {.tag = 8});
        say(world, text("sent ", me));
        barrier();
        return;
      }
      const at::Tensor t = number(0);
      for (int r = 1; r < 4; ++r) hear(world, text("sent ", r));
      for (int r = 1; r < 4; ++r)
        if (marks(r)) recv(t, r, {.tag = 8});
      std::map<int, int> from;
      int received = 0;
      for (; from.size() < 3 && received < kMany + 2; ++received) ++from[recv(t, kAnySource)];
      EXPECT_EQ(from.size(), 3u);
      if (by_turns) {
        EXPECT_LE(received, 6) << "with rank " << flooder << "'s messages before the others'";
      }
      for (; received < kMany + 2; ++received) recv(t, kAnySource);
      barrier();
    });
}

TEST_P(AnySource, WhatIsWrongIsSaid) {
  run(3, [](World& world) {
    if (world.rank() != 0) {
      hear(world, "waited");
      EXPECT_THROW(recv(number(0), 0), TimeoutError);  // the group's failure
      return;
    }
    EXPECT_THROW(irecv(number(0), 3), InvalidArgument);
    const auto began = Clock::now();
    const std::string message =
        message_of<TimeoutError>([] { recv(at::zeros({4}), kAnySource, {.tag = 17, .timeout = milliseconds(80)}); });
    for (const char* const part : {"recv of 4 x Float (16 bytes) with tag 17 from any rank on rank 0", "timed out"})
      EXPECT_CONTAINS(message, part);
    EXPECT_GE(Clock::now() - began, milliseconds(80));
    EXPECT_THROW(irecv(number(0), kAnySource).wait(), TimeoutError);  // the group has failed
    say(world, "waited");
  });
}

TEST_P(AnySource, AMessageThatDoesNotFitIsAMismatch) {
  for (const int sender : {1, 2})
    run(3, [sender](World& world) {
      if (world.rank() == sender) {
        send(at::zeros({5}), 0);
        EXPECT_THROW(recv(number(0), 0, {.tag = 1}), Mismatch);
      } else if (world.rank() == 0) {
        const auto said = message_of<Mismatch>([] { recv(at::zeros({4}), kAnySource); });
        EXPECT_CONTAINS(said, text("but rank ", sender, " (comm_any_source_test.cpp:"));
        EXPECT_CONTAINS(said, ") sent 5 x Float");
        say(world, "told");
      } else {
        EXPECT_THROW(recv(number(0), 0, {.tag = 1}), Mismatch);
      }
      if (world.rank() != 0) hear(world, "told");
    });
}

// A rank alone in its group waits for nobody in particular.
TEST_P(AnySource, AloneItTimesOut) {
  run(2, [](World& world) {
    const Group alone = world.group().split(world.rank());
    const auto said = message_of<TimeoutError>(
        [&] { recv(number(0), kAnySource, {.group = alone, .timeout = std::chrono::milliseconds(20)}); });
    EXPECT_CONTAINS(said, "timed out");
    EXPECT_EQ(said.find("waiting for  "), std::string::npos) << said;
  });
}

// When all others have gone, what they sent can still be received, and later receives do not wait.
TEST_P(AnySource, AfterTheOthersHaveLeft) {
  run(3, [](World& world) {
    if (world.rank() != 0) {
      send(number(world.rank()), 0);
      if (world.rank() == 1) hear(world, "first");
      return;
    }
    const at::Tensor t = number(0);
    int sum = recv(t, kAnySource);
    say(world, "first");
    sum += recv(t, kAnySource);
    EXPECT_EQ(sum, 3);
    EXPECT_CONTAINS(message_of<PeerLost>([&] { recv(t, kAnySource); }), "rank");
  });
}

// A rank that has left ends no receive that another rank may still answer.
TEST_P(AnySource, AfterOneOfTheOthersHasLeft) {
  run(4, [this](World& world) {
    std::optional<World> other(world_beside(world));
    std::optional<World::Scope> scope(std::in_place, *other);
    for (int i = 0; i < 3; ++i) barrier();
    if (world.rank() == 3) {
      scope.reset();
      other.reset();
    }
    barrier({.group = world.group()});
    if (world.rank() == 3) return;
    const at::Tensor t = number(world.rank());
    if (world.rank() == 0) {
      EXPECT_EQ(recv(t, kAnySource) + recv(t, kAnySource), 3);
      for (const int peer : {1, 2}) send(t, peer);
    } else {
      send(t, 0);
      EXPECT_EQ(recv(t, kAnySource), 0);
    }
  });
}

// If a World ends while receives wait, their works end with an error, and nothing hangs.
TEST_P(AnySource, LeavesWithReceivesWaiting) {
  run(3, [this](World& world) {
    at::Tensor t = number(0), u = number(0);
    Work any, behind;
    {
      World other = world_beside(world);
      const World::Scope scope(other);
      barrier();
      any = irecv(t, kAnySource, {.tag = 4});
      behind = irecv(u, (world.rank() + 1) % 3, {.tag = 4});
      // Of the outer World: a rank that leaves fails the receives from it, and so the group, perhaps in a barrier.
      barrier({.group = world.group()});
    }
    EXPECT_ANY_THROW(any.wait());
    EXPECT_ANY_THROW(behind.wait());
    barrier();
  });
}

// --- the loss of a sender, seen by a rank that waits for no particular rank ---

class AnySourceFork : public testing::TestWithParam<int> {};
// The victims: a rank of the receiver's host, the leader of another host, and neither.
INSTANTIATE_TEST_SUITE_P(Comm, AnySourceFork, testing::Values(1, 2, 3));

TEST_P(AnySourceFork, KilledSenderIsNamed) {
  const int victim = GetParam();
  constexpr int kRanks = 4;
  for (const bool async : {false, true}) {
    const ForkedJob job;
    SharedNumbers waits(kRanks);
    ForkedRanks ranks(kRanks, [&](int rank) -> std::string {
      World world = job.join(rank, kRanks, {.backend = "hierarchical", .timeout = kPatience}, {"a", "a", "b", "b"});
      const World::Scope scope(world);
      barrier();
      if (rank == victim) send(number(7), 0);
      const at::Tensor t = number(0);
      if (rank == 0) {
        EXPECT_EQ(recv(t, kAnySource), victim);
        EXPECT_EQ(t.item<int64_t>(), 7);
      }
      waits[static_cast<size_t>(rank)] = 1;
      if (rank != 0) {  // these ranks call no operation, so they do not notice the loss
        world.store().get(rank == victim ? "nobody sets this" : "told", patience());
        return {};
      }
      try {
        if (async)
          irecv(t, kAnySource).wait();
        else
          recv(t, kAnySource);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const PeerLost& lost) {
        EXPECT_EQ(lost.rank(), victim) << lost.what();
        EXPECT_CONTAINS(lost.what(), text("rank ", victim));
      }
      EXPECT_THROW(recv(t, kAnySource), PeerLost);
      world.store().set("told", "1");
      return {};
    });
    while (waits[0] + waits[1] + waits[2] + waits[3] < kRanks) ::usleep(1000);
    ranks.signal(victim, SIGKILL);
    for (int r = 0; r < kRanks; ++r) {
      const auto end = ranks.wait(r, patience());
      if (r == victim) continue;
      EXPECT_TRUE(end.exited && end.status == 0) << "rank " << r << ": " << end.said << ", signal " << end.signal;
    }
  }
}

// --- the loss of a rank, after another one has left in order ---

class DepartedFork : public testing::TestWithParam<std::vector<std::string>> {};
INSTANTIATE_TEST_SUITE_P(Comm, DepartedFork,
                         testing::Values(std::vector<std::string>{"a", "a", "a"},
                                         std::vector<std::string>{"a", "b", "c"}),
                         [](const auto& info) { return info.index == 0 ? "one_host" : "hosts"; });

TEST_P(DepartedFork, IsNotBlamedForTheLossOfAnother) {
  constexpr int kRanks = 3;
  const ForkedJob job;
  SharedNumbers waits(kRanks);
  ForkedRanks ranks(kRanks, [&](int rank) -> std::string {
    World world = job.join(rank, kRanks, {.backend = "gloo", .timeout = kPatience}, GetParam());
    const World::Scope scope(world);
    barrier();
    if (rank == 1) return {};
    const at::Tensor t = number(7);
    if (rank == 2) {
      send(t, 0);
      waits[2] = 1;
      world.store().get("nobody sets this", patience());
    }
    recv(t, 2);
    waits[0] = 1;
    try {
      recv(t, 2);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const PeerLost& lost) {
      EXPECT_EQ(lost.rank(), 2) << lost.what();
    }
    return {};
  });
  EXPECT_EQ(ranks.wait(1, patience()).status, 0);
  while (waits[0] + waits[2] < 2) ::usleep(1000);
  ranks.signal(2, SIGKILL);
  const auto end = ranks.wait(0, patience());
  EXPECT_TRUE(end.exited && end.status == 0) << end.said << ", signal " << end.signal;
}

}  // namespace
}  // namespace muster::test
