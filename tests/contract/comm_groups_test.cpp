// Groups: some of the ranks, in any order, several at the same time.

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <memory>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/core/backend.h"
#include "muster/comm/spawn.h"
#include "support/asleep.h"
#include "support/collective_cases.h"
#include "support/forked.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

class Groups : public CommContract {
 protected:
  static void use(World& world, const Group& group) {
    int64_t number = 0;
    for (const auto& subject : collectives())
      for (const int64_t count : {3, 2000, 100'000}) {
        ++number;
        const Case c{.world = world,
                     .group = group,
                     // Over several hosts, sums are not taken in the order of the group's ranks.
                     .dtype = group.backend_name() == "hierarchical" ? at::kLong : at::kFloat,
                     .count = count,
                     .kind = kKinds[static_cast<size_t>(number) % std::size(kKinds)],
                     .root = static_cast<int>(number % group.size()),
                     .async = number % 3 == 0,
                     .shift = number * 41};
        SCOPED_TRACE(testing::Message() << subject.name << ", " << c);
        subject.start(c)();
      }
  }
};
MUSTER_COMM_CONTRACT(Groups);

TEST_P(Groups, AnyRanksInAnyOrder) {
  run(5, [](World& world) {
    for (const std::vector<int>& ranks : std::vector<std::vector<int>>{{3, 1, 4}, {2}, {4, 3, 2, 1, 0}, {1, 0}}) {
      const Group group = world.new_group(ranks);
      const auto place = std::find(ranks.begin(), ranks.end(), world.rank());
      EXPECT_EQ(group.ranks(), ranks);
      EXPECT_EQ(group.size(), static_cast<int>(ranks.size()));
      EXPECT_EQ(group.is_member(), place != ranks.end());
      EXPECT_EQ(group.rank(), place == ranks.end() ? -1 : static_cast<int>(place - ranks.begin()));
      for (size_t i = 0; i < ranks.size(); ++i) EXPECT_EQ(group.global_rank(static_cast<int>(i)), ranks[i]);
      EXPECT_CONTAINS(message_of<InvalidArgument>([&] { group.global_rank(group.size()); }), "rank: expected 0 to ");
      EXPECT_CONTAINS(message_of<InvalidArgument>([&] { group.global_rank(-1); }),
                      text("rank: expected 0 to ", group.size() - 1, " in a group of ", group.size(), ", got -1"));
      if (group.is_member()) {
        use(world, group);
      } else {
        const at::Tensor t = at::ones({2});
        EXPECT_CONTAINS(message_of<InvalidArgument>([&] { all_reduce(t, {.group = group}); }), "not a member");
        EXPECT_CONTAINS(message_of<InvalidArgument>([&] { all_reduce_async(t, {.group = group}); }), "not a member");
        EXPECT_CONTAINS(message_of<InvalidArgument>([&] { group.stats(); }), "not a member");
        EXPECT_CONTAINS(message_of<InvalidArgument>([&] { group.c10d_backend(); }), "not a member");
      }
    }
    use(world, world.group());
  });
}

TEST_P(Groups, BadRanksAreInvalidArgument) {
  run(2, [](World& world) {
    for (const std::vector<int>& ranks : std::vector<std::vector<int>>{{}, {0, 0}, {0, 2}, {-1}})
      EXPECT_THROW(world.new_group(ranks), InvalidArgument);
    const Group group = world.new_group({0, 1});  // the ranks still agree about which group is the next
    use(world, group);
  });
}

TEST_P(Groups, SplitByColorInTheOrderOfKeys) {
  run(5, [](World& world) {
    const int me = world.rank();
    // Ranks 0, 2, 4 in the reverse order; 1 and 3 in their own, because their keys are equal.
    const Group parity = world.group().split(me % 2, me % 2 == 0 ? -me : 7);
    EXPECT_EQ(parity.ranks(), me % 2 == 0 ? (std::vector<int>{4, 2, 0}) : (std::vector<int>{1, 3}));
    use(world, parity);
    // A part of a part: each rank alone, except for rank 2, which is in none.
    const Group alone = parity.split(me == 2 ? -1 : parity.rank());
    EXPECT_EQ(alone.ranks(), me == 2 ? std::vector<int>() : std::vector<int>{me});
    EXPECT_EQ(alone.is_member(), me != 2);
    if (alone.is_member())
      use(world, alone);
    else
      EXPECT_THROW(alone.split(0), InvalidArgument);
    // The second split of the same group is another group.
    const Group again = world.group().split(0);
    EXPECT_EQ(again.ranks(), world.group().ranks());
    use(world, again);
    use(world, parity);
  });
}

TEST_P(Groups, HaveBackendsTimeoutsAndNamesOfTheirOwn) {
  run(3, [](World& world) {
    const GroupOptions options{.backend = "gloo", .timeout = 2 * kPatience, .name = "the pair"};
    const Group named = world.new_group({0, 2}, options),
                other = world.group().split(world.rank() == 1 ? -1 : 3, 0, options);
    for (const Group& group : {named, other}) {
      if (!group.is_member()) continue;
      EXPECT_EQ(group.backend_name(), "gloo");
      EXPECT_EQ(comm::backend_of(group).timeout(), 2 * kPatience);
      EXPECT_EQ(comm::backend_of(group).group_name(), "the pair");
      use(world, group);
    }
    EXPECT_THROW(world.new_group({0, 1, 2}, {.backend = "tin cans"}), InvalidArgument);
    // These two are on one host in every setup. If the World's backend maps no heaps, this group does without.
    const Group shared = world.new_group({0, 1}, {.backend = "shm"});
    if (shared.is_member()) {
      EXPECT_EQ(shared.backend_name(), "shm");
      use(world, shared);
    }
  });
}

TEST_P(Groups, TwoAtOnceFromTwoThreads) {
  run(3, [](World& world) {
    const Group forth = world.new_group({0, 1, 2}), back = world.new_group({2, 1, 0});
    std::jthread other([&] {
      const World::Scope scope(world);
      for (int i = 0; i < (kSanitized ? 1 : 5); ++i) use(world, back);
    });
    for (int i = 0; i < (kSanitized ? 1 : 5); ++i) use(world, forth);
  });
}

// In a fork, libtorch would create its thread pool again in each of two threads that ask concurrently, and one of them
// would find no pool.
TEST(SpawnProcess, ThreadsOfARankFindLibtorchsPool) {
  at::set_num_threads(1);  // now this process has a pool, and a child of it has none
  for (int i = 0; i < 40; ++i)
    spawn(1, [](World&) {
      std::barrier at_once(2);
      const auto use_it = [&] {
        at_once.arrive_and_wait();
        at::ones({300}).sum();
      };
      std::jthread other(use_it);
      use_it();
    });
}

// One group used by several threads. The callers are responsible for the order, but nothing breaks.
TEST_P(Groups, OneFromTwoThreads) {
  run(2, [](World& world) {
    constexpr int kRounds = 200;
    const auto work = [&] {
      const World::Scope scope(world);
      for (int i = 0; i < kRounds; ++i) {
        const at::Tensor t = at::ones({300});
        if (i % 3)
          all_reduce(t);
        else
          all_reduce_async(t).wait();
        ASSERT_EQ(t[299].item<float>(), 2);
      }
    };
    std::thread other(work);
    work();
    other.join();
    EXPECT_EQ(world.group().stats().operations, 2u * kRounds);
  });
}

TEST_P(Groups, DefaultHandle) {
  run(2, [](World& world) {
    EXPECT_EQ(Group().rank(), world.rank());
    EXPECT_EQ(Group().size(), 2);
    EXPECT_EQ(Group().backend_name(), world.group().backend_name());
    const Group mine = Group().resolved();
    std::thread([&] {
      EXPECT_THROW(Group().rank(), Aborted);
      EXPECT_THROW(Group().resolved(), Aborted);
      EXPECT_EQ(mine.rank(), world.rank());
      all_reduce(at::ones({3}), {.group = mine});  // no World is current here
    }).join();
  });
}

TEST_P(Groups, Stats) {
  run(2, [](World& world) {
    const Group group = world.new_group({0, 1});
    EXPECT_EQ(group.stats().operations, 0u);
    EXPECT_EQ(group.stats().bytes, 0u);
    const at::Tensor t = at::ones({100});
    all_reduce(t, {.group = group});
    all_reduce_async(t, {.group = group}).wait();
    if (world.rank() == 0)
      send(t, 1, {.group = group});
    else
      recv(t, 0, {.group = group});
    barrier({.group = group});
    EXPECT_EQ(group.stats().operations, 4u);
    EXPECT_EQ(group.stats().bytes, 3 * 400u);
    // The time that rank 0 counts as blocked covers the time from when it was seen to wait until rank 1 came.
    const auto before = group.stats().blocked;
    if (world.rank() == 0) {
      int64_t waits_since = 0;
      {
        const OnceAsleep watch([&] {
          waits_since = now_ns();
          world.store().set("0 waits", "1");
        });
        barrier({.group = group});
      }
      const int64_t called_at = std::stoll(world.store().get("1 called at", patience()));
      EXPECT_GE((group.stats().blocked - before).count(), (called_at - waits_since) / 10 * 9);  // two clocks
    } else {
      Work().wait();
      world.store().get("0 waits", patience());
      world.store().set("1 called at", text(now_ns()));
      barrier({.group = group});
    }
    EXPECT_EQ(world.group().stats().operations, 0u);
  });
}

// A handle may outlive its World. Its use then throws, and does not crash.
TEST_P(Groups, HandleOutlivesItsWorld) {
  run(2, [this](World& outer) {
    Group kept, kept_default;
    Work work;
    {
      World world = world_beside(outer);
      kept = world.new_group({1, 0});
      kept_default = world.group();
      work = all_reduce_async(at::ones({3}), {.group = kept});
      work.wait();
      barrier({.group = kept_default});
    }
    EXPECT_EQ(kept.size(), 2);
    EXPECT_EQ(kept.stats().operations, 1u);
    for (const Group& group : {kept, kept_default}) {
      EXPECT_THROW(all_reduce(at::ones({3}), {.group = group}), Aborted);
      EXPECT_THROW(all_reduce_async(at::ones({3}), {.group = group}), Aborted);
      EXPECT_THROW(send(at::ones({3}), 0, {.group = group}), Aborted);
      EXPECT_THROW(irecv(at::ones({3}), 0, {.group = group}), Aborted);
      EXPECT_THROW(barrier({.group = group}), Aborted);
      EXPECT_THROW(group.split(0), Aborted);
    }
    work.wait();
    barrier();
  });
}

// A long job may make groups again and again. When the last handle is dropped, a group leaves nothing behind.
TEST_P(Groups, ThatAreReleasedLeaveNothingBehind) {
  const auto entries = [](const char* folder) {
    const auto list = std::filesystem::directory_iterator(folder);
    return std::distance(begin(list), end(list));
  };
  const auto mappings = [] {
    std::ifstream in("/proc/self/maps");
    return std::count(std::istreambuf_iterator<char>(in), {}, '\n');
  };
  run(2, [&](World& world) {
    const auto use_one = [&](bool forget) {
      const Group group = world.new_group({1, 0});
      at::Tensor t = at::ones({1000});
      all_reduce(t, {.group = group});
      all_reduce_async(t, {.group = group}).wait();
      Work forgotten = all_reduce_async(t, {.group = group});
      const int other = 1 - world.rank();
      Work sent = isend(t, group.rank() == 0 ? 1 : 0, {.group = group});
      recv(at::zeros({1000}), group.rank() == 0 ? 1 : 0, {.group = group});
      sent.wait();
      if (!forget) forgotten.wait();
      EXPECT_EQ(group.global_rank(1 - group.rank()), other);
    };
    for (int i = 0; i < 3; ++i) use_one(true);  // makes all that is made once and stays
    use_one(false);
    world.new_group({0});  // ends groups that lingered
    barrier();
    const auto descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task"), maps = mappings();
    const auto keys = world.store().num_keys();
    barrier();
    const bool is_shm = world.group().backend_name() == "shm";
    const int many = is_shm ? 60 : 20;
    for (int i = 0; i < many; ++i) use_one(true);
    use_one(false);
    world.new_group({0});
    barrier();
    // A group whose last operation was still under way lingers: there may be one or two more than before.
    EXPECT_LT(entries("/proc/self/fd"), descriptors + many);
    EXPECT_LT(entries("/proc/self/task"), threads + many);
    EXPECT_LT(mappings(), maps + many);
    EXPECT_LT(world.store().num_keys(), keys + (is_shm ? many : 3 * many));  // a lingering one has a dozen
    barrier();
  });
}

// A rank that is late may still write to a failed operation's tensor on the heap. So its memory is not another tensor's
// later, although the group has gone.
TEST_P(Groups, AFailedOperationsMemoryIsNotGivenAgain) {
  run(2, [](World& world) {
    if (world.group().backend_name() != "shm") return;
    constexpr int64_t kMany = 1 << 20;
    const auto address_of_new = [&] { return world.heap().empty({kMany}).const_data_ptr(); };
    const void* failed = nullptr;
    {
      const Group group = world.new_group({0, 1});
      const at::Tensor t = world.heap().zeros({kMany});
      failed = t.const_data_ptr();
      if (world.rank() == 0) {
        EXPECT_THROW(all_reduce(t, {.group = group, .timeout = std::chrono::milliseconds(1)}), TimeoutError);
      }
      barrier();
    }
    world.new_group({0});
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(address_of_new() == failed, world.rank() == 1);  // rank 1 was in no operation
    }
    barrier();
  });
}

// The last handle is dropped while an operation is under way, and in a callback of the group's operation.
TEST_P(Groups, AnOperationGoesOnWhenTheLastHandleGoes) {
  run(2, [](World& world) {
    at::Tensor t = at::ones({1000});
    Work work = all_reduce_async(t, {.group = world.new_group({0, 1})});
    work.wait();
    EXPECT_TRUE(t.eq(2).all().item<bool>());
    auto handle = std::make_shared<std::optional<Group>>(world.new_group({0, 1}));
    Work last = all_reduce_async(t, {.group = **handle});
    std::promise<void> gone;
    last.c10d_work()->getFuture()->addCallback([handle, &gone](auto&) {
      handle->reset();
      gone.set_value();
    });
    handle.reset();
    last.wait();
    ASSERT_EQ(gone.get_future().wait_until(patience().when()), std::future_status::ready);
    EXPECT_TRUE(t.eq(4).all().item<bool>());
    barrier();
  });
}

// Also groups whose last handle is gone while an operation is under way.
TEST_P(Groups, AnAbortReachesThoseWithoutAHandle) {
  run(2, [](World& world) {
    std::optional<Group> group(world.new_group({0, 1}));
    if (world.rank() == 1) {
      world.store().get("aborted", patience());
      return;
    }
    Work work = all_reduce_async(at::ones({2}), {.group = *group});
    group.reset();
    world.abort("enough");
    EXPECT_CONTAINS(message_of<Aborted>([&] { work.wait(); }), "enough");
    world.store().set("aborted", "1");
  });
}

// The memory of a tensor that no peer can be writing to is free when the operation has failed.
TEST_P(Groups, OperationsOfAFailedGroupCostNoMemory) {
  run(2, [](World& world) {
    const Group group = world.new_group({0, 1});
    barrier({.group = group});
    if (world.rank() == 0) comm::backend_of(group).abort();
    EXPECT_THROW(barrier({.group = group}), Aborted);
    const size_t before = world.heap().used();
    for (int i = 0; i < 10; ++i) {
      const at::Tensor t = world.heap().zeros({10'000});
      EXPECT_THROW(all_reduce(t, {.group = group}), Aborted);
      EXPECT_THROW(broadcast(t, 0, {.group = group}), Aborted);
    }
    EXPECT_EQ(world.heap().used(), before);
  });
}

// A fork has copies of the groups, whose memberships are the parent's.
TEST(GroupsFork, AForkThatDropsAGroupEndsNothing) {
  const ForkedJob job;
  ForkedRanks ranks(2, [&](int rank) -> std::string {
    World world = job.join(rank, 2, {.timeout = kPatience});
    std::optional<Group> group(world.new_group({0, 1}));
    const at::Tensor t = world.heap().zeros({10'000}).fill_(1);
    all_reduce(t, {.group = *group});
    if (rank == 0) {
      const pid_t child = ::fork();
      if (child == 0) {
        group.reset();
        ::_exit(0);
      }
      int status = -1;
      EXPECT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0);
      world.store().set("forked", "1");
    } else {
      world.store().get("forked", patience());
    }
    all_reduce(t, {.group = *group});
    EXPECT_TRUE(t.eq(4).all().item<bool>());
    return {};
  });
  for (int rank = 0; rank < 2; ++rank) {
    const auto end = ranks.wait(rank, patience());
    EXPECT_TRUE(end.exited && end.status == 0) << end.said << ", signal " << end.signal;
  }
}

// Code for c10d uses a group as a c10d::Backend.
TEST_P(Groups, SpeakC10d) {
  run(2, [](World& world) {
    const auto backend = world.group().c10d_backend();
    const int rank = world.rank();
    EXPECT_EQ(backend->getRank(), rank);
    EXPECT_EQ(backend->getSize(), 2);
    const auto mine = [&] { return at::full({4}, rank + 1.0); };
    const auto is = [](const at::Tensor& t, double value) { return (t == value).all().item<bool>(); };

    std::vector<at::Tensor> tensors = {mine()};
    backend->allreduce(tensors, {})->wait();
    EXPECT_TRUE(is(tensors[0], 3));
    c10d::AllreduceOptions max;
    max.reduceOp = c10d::ReduceOp::MAX;
    tensors = {mine()};
    backend->allreduce(tensors, max)->wait();
    EXPECT_TRUE(is(tensors[0], 2));
    max.reduceOp = c10d::ReduceOp::BXOR;
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { backend->allreduce(tensors, max); }),
                    "BXOR is not defined here for tensors of Float");

    c10d::BroadcastOptions from_one;
    from_one.rootRank = 1;
    tensors = {mine()};
    backend->broadcast(tensors, from_one)->wait();
    EXPECT_TRUE(is(tensors[0], 2));
    c10d::ReduceOptions to_one;
    to_one.rootRank = 1;
    tensors = {mine()};
    backend->reduce(tensors, to_one)->wait();
    EXPECT_TRUE(is(tensors[0], rank == 1 ? 3 : 1));

    std::vector<at::Tensor> inputs = {mine()}, outputs = {at::zeros({4}), at::zeros({4})};
    std::vector<std::vector<at::Tensor>> output_lists = {outputs};
    backend->allgather(output_lists, inputs, {})->wait();
    EXPECT_TRUE(is(outputs[0], 1) && is(outputs[1], 2));
    at::Tensor all = at::zeros({8}), one = mine();
    backend->_allgather_base(all, one, {})->wait();
    EXPECT_TRUE(is(all.narrow(0, 0, 4), 1) && is(all.narrow(0, 4, 4), 2));
    backend->_reduce_scatter_base(one, all, {})->wait();
    EXPECT_TRUE(is(one, 2 * (rank + 1)));
    std::vector<std::vector<at::Tensor>> input_lists = {{mine(), mine()}};
    tensors = {at::zeros({4})};
    backend->reduce_scatter(tensors, input_lists, {})->wait();
    EXPECT_TRUE(is(tensors[0], 3));

    std::vector<std::vector<at::Tensor>> gathered, scattered;
    if (rank == 0)
      gathered = {{at::zeros({4}), at::zeros({4})}}, scattered = {{at::full({4}, 7.0), at::full({4}, 8.0)}};
    inputs = {mine()};
    backend->gather(gathered, inputs, {})->wait();
    if (rank == 0) {
      EXPECT_TRUE(is(gathered[0][1], 2));
    }
    tensors = {at::zeros({4})};
    backend->scatter(tensors, scattered, {})->wait();
    EXPECT_TRUE(is(tensors[0], 7 + rank));

    std::vector<int64_t> none;
    at::Tensor in = mine(), out = at::zeros({4});
    backend->alltoall_base(out, in, none, none, {})->wait();
    EXPECT_TRUE(is(out.narrow(0, 0, 2), 1) && is(out.narrow(0, 2, 2), 2));
    tensors = {mine()};
    if (rank == 0)
      backend->send(tensors, 1, 5)->wait();
    else
      backend->recv(tensors, 0, 5)->wait();
    EXPECT_TRUE(is(tensors[0], 1));
    backend->barrier({})->wait();
    tensors = {mine(), mine()};
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { backend->allreduce(tensors, {}); }), "one tensor per rank");
  });
}

}  // namespace
}  // namespace muster::test
