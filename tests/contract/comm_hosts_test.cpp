// Ranks on several hosts (faked on one machine, and as network namespaces). Who comes last is in
// comm_stragglers_test.cpp.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <future>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/text.h"
#include "contract/comm_hosts_fixture.h"
#include "multiprocess/launch_support.h"
#include "support/forked.h"

namespace muster::test::faked_hosts {
namespace {

// --- several hosts ---

TEST(Hosts, AutoIsShmOnOneAndHierarchicalOverSeveral) {
  run_threads(2, [](World& world) { EXPECT_EQ(world.group().backend_name(), "shm"); });
  run_on({"a", "a", "b", "b"}, [](World& world) {
    EXPECT_EQ(world.group().backend_name(), "hierarchical");
    const Group inside = world.new_group({0, 1}), across = world.new_group({3, 0});
    if (world.rank() < 2) {
      EXPECT_EQ(inside.backend_name(), "shm");
    }
    for (const auto& group : {inside, across})
      if (group.is_member()) {
        const at::Tensor t = at::full({5000}, world.rank() + 1.0);
        all_reduce(t, {.group = group});
        EXPECT_EQ(t[4999].item<double>(), group.ranks()[0] + group.ranks()[1] + 2);
      }
  });
}

FaultPlan fault_of(FaultAction action, int rank, FaultPhase phase) {
  FaultPlan plan;
  plan.add({.action = action, .rank = rank, .phase = phase});
  return plan;
}

// A rank stands still before a large operation or in its middle. All others name it, also those that wait for their
// leader then.
TEST(Hosts, AMissingRankOfALargeSumIsNamed) {
  for (const auto& [victim, phase] : {std::pair(2, FaultPhase::kPosted), {3, FaultPhase::kStart}}) {  // 2 leads
    const int number = victim;
    run_on(
        {"a", "a", "b", "b"},
        [&](World& world) {
          SCOPED_TRACE(testing::Message() << "rank " << number);
          try {
            all_reduce(at::ones({1'500'000}), {.timeout = std::chrono::seconds(2)});
            ADD_FAILURE() << "rank " << world.rank() << " has not waited";
          } catch (const Error& error) {
            const std::string said = error.what();  // not only where the error was seen
            EXPECT_CONTAINS(said.substr(0, said.find(" [")), text("rank ", number));
          }
        },
        options_of("auto", fault_of(FaultAction::kStop, victim, phase)));
  }
}

// A leader whose first step inside its host comes while its group between the hosts is busy.
TEST(Hosts, ALeaderThatEndsInALargeBroadcast) {
  run_on(
      {"a", "a", "b", "b"},
      [](World& world) {
        const auto broadcasts = [&] {
          for (;;) broadcast(at::ones({1'500'000}), 0);
        };
        const std::string said = message_of<PeerLost>(broadcasts);
        EXPECT_CONTAINS(said, "rank 2") << world.rank();
      },
      options_of("auto", fault_of(FaultAction::kKill, 2, FaultPhase::kMiddle)));
}

// A callback of one of them may receive and wait for that: with its own tag, with another one, from a rank or from any.
TEST(Hosts, CallbacksOfReceivesFromAnybodyMayReceive) {
  run_on({"a", "a", "b"}, [](World& world) {
    const Group group = world.group();
    constexpr int kMessages = 6;
    if (world.rank() != 0) {
      for (int i = 0; i < kMessages; ++i) {
        world.store().get(text("next ", i), patience());
        if (i % 2 + 1 == world.rank()) send(at::full({3}, i, at::kFloat), 0, {.tag = i < 3 ? 5 : 6});
      }
      return;
    }
    std::vector<at::Tensor> got;
    for (int i = 0; i < kMessages; ++i) got.push_back(at::zeros({3}));
    const auto next = [&](int i) { world.store().set(text("next ", i), ""); };
    std::promise<void> over;
    Work first = irecv(got[0], kAnySource, {.tag = 5});
    first.c10d_work()->getFuture()->addCallback([&](c10::ivalue::Future&) {
      next(1);
      recv(got[1], kAnySource, {.tag = 5, .group = group});
      next(2);
      irecv(got[2], 1, {.tag = 5, .group = group}).wait();
      irecv(got[3], kAnySource, {.tag = 6, .group = group})
          .c10d_work()
          ->getFuture()
          ->addCallback([&](c10::ivalue::Future&) {  // in a callback's callback
            next(4);
            recv(got[4], kAnySource, {.tag = 6, .group = group});
            next(5);
            recv(got[5], kAnySource, {.tag = 6, .group = group});
            over.set_value();
          });
      next(3);
    });
    next(0);
    auto ended = over.get_future();
    ASSERT_EQ(ended.wait_for(kPatience), std::future_status::ready);
    for (int i = 0; i < kMessages; ++i)
      EXPECT_TRUE(got[static_cast<size_t>(i)].eq(i).all().item<bool>()) << got[static_cast<size_t>(i)];
  });
}

// The thread that looks for messages from anybody moves other messages, too. Their callbacks may wait for it.
TEST(Hosts, CallbacksBesideReceivesFromAnybodyMayReceiveFromAnybody) {
  run_on({"a", "a", "b"}, [](World& world) {
    const Group group = world.group();
    for (const int tag : {5, 6}) {  // that of the receive that waits, and another one
      const at::Tensor first = at::zeros({3}), second = at::zeros({3}), last = at::zeros({3});
      if (world.rank() == 1) {
        world.store().get(text("posted ", tag), patience());
        send(at::full({3}, 1, at::kFloat), 0, {.tag = 9});
        world.store().get(text("in callback ", tag), patience());
      }
      if (world.rank() == 2) {
        world.store().get(text("in callback ", tag), patience());
        for (const int value : {2, 3}) send(at::full({3}, value, at::kFloat), 0, {.tag = value == 2 ? 5 : tag});
      }
      if (world.rank() == 0) {
        std::promise<void> over;
        Work waiting = irecv(first, kAnySource, {.tag = 5}), other = irecv(second, 1, {.tag = 9});
        other.c10d_work()->getFuture()->addCallback([&](c10::ivalue::Future&) {
          world.store().set(text("in callback ", tag), "");
          recv(last, kAnySource, {.tag = tag, .group = group});
          over.set_value();
        });
        world.store().set(text("posted ", tag), "");
        auto ended = over.get_future();
        ASSERT_EQ(ended.wait_for(kPatience), std::future_status::ready);
        waiting.wait();
        EXPECT_TRUE(first.eq(2).all().item<bool>() && last.eq(3).all().item<bool>());
      }
    }
  });
}

// Also what only the way to another host refuses.
TEST(Hosts, ABatchThatIsRefusedLeavesNoTrace) {
  run_on({"a", "a", "b"}, [](World& world) {
    const at::Tensor a = at::zeros({3}), b = at::zeros({3});
    if (world.rank() == 1) send(at::full({3}, 7, at::kFloat), 0);
    if (world.rank() != 0) return;
    constexpr int kTooLarge = 1 << 28;
    EXPECT_THROW(batch_isend_irecv({{P2POp::kRecv, a, 1}, {P2POp::kSend, b, 2, {.tag = kTooLarge}}}), InvalidArgument);
    EXPECT_THROW(irecv(a, kAnySource, {.tag = kTooLarge}), InvalidArgument);
    recv(b, 1);
    EXPECT_TRUE(a.eq(0).all().item<bool>() && b.eq(7).all().item<bool>());
  });
}

// Messages from any host, including the receiver's, on hosts of all kinds.
TEST(Hosts, ReceivesFromAnybody) {
  const std::vector<Hosts> shapes = {{"a", "b"}, {"a", "b", "a", "b"}, {"a", "b", "b", "b", "a"}};
  for (const auto& hosts : shapes)
    run_on(hosts, [&](World& world) {
      const int n = world.world_size();
      for (int receiver = 0; receiver < n; ++receiver) {
        const Work sending = isend(at::full({30'000}, world.rank(), at::kFloat), receiver);
        std::vector<int> sources;
        for (int i = 0; i < n && world.rank() == receiver; ++i) {
          const at::Tensor t = at::zeros({30'000});
          sources.push_back(recv(t, kAnySource));
          EXPECT_TRUE(t.eq(sources.back()).all().item<bool>());
        }
        Work(sending).wait();
        std::sort(sources.begin(), sources.end());
        for (size_t r = 0; r < sources.size(); ++r) EXPECT_EQ(sources[r], static_cast<int>(r)) << join(hosts);
      }
      const std::string refusal = message_of<InvalidArgument>([&] { send(at::zeros({1}), 0, {.tag = -1}); });
      EXPECT_CONTAINS(refusal, "tag");
      EXPECT_CONTAINS(refusal, ": expected 0 ");
      EXPECT_CONTAINS(refusal, ", got -1");
      barrier();  // the group still works
    });
}

// --- the loss of a rank between hosts ---

struct Loss {
  std::string backend;
  Hosts hosts;
  int victim;
  int64_t count = 2000;  // elements of what the ranks sum
};
void PrintTo(const Loss& loss, std::ostream* out) {
  *out << loss.backend << ", rank " << loss.victim << (loss.count > 2000 ? ", large" : "");
}

class HostsFork : public testing::TestWithParam<Loss> {};
INSTANTIATE_TEST_SUITE_P(Comm, HostsFork,
                         testing::Values(Loss{"gloo", {}, 0}, Loss{"gloo", {}, 2},
                                         Loss{"gloo", {"a", "b", "c", "d"}, 1},  // no rank sees the process itself
                                         Loss{"hierarchical", {"a", "a", "b", "b"}, 3},  // not a leader
                                         Loss{"hierarchical", {"a", "a", "b", "b"}, 2},  // a leader
                                         Loss{"hierarchical", {"a", "a", "b", "b"}, 0},  // the first
                                         Loss{"gloo", {}, 1, 4'000'000},                 // in several blocks
                                         Loss{"hierarchical", {"a", "a", "b", "b"}, 3, 4'000'000},
                                         Loss{"hierarchical", {"a", "a", "b", "b"}, 2, 4'000'000}));

TEST_P(HostsFork, KilledRankIsNamedOnAllOthers) {
  const Loss& loss = GetParam();
  constexpr int kRanks = 4;
  for (const bool asleep : {false, true}) {  // killed in a collective in which the others wait, or outside of one
    const ForkedJob job;
    SharedNumbers started(kRanks), noticed(kRanks);
    ForkedRanks ranks(kRanks, [&](int rank) -> std::string {
      World world = job.join(rank, kRanks, options_of(loss.backend), loss.hosts);
      const World::Scope scope(world);
      barrier();
      started[static_cast<size_t>(rank)] = 1;
      if (rank == loss.victim && asleep)
        for (;;) ::pause();
      try {
        for (;;) all_reduce(at::ones({loss.count}));
      } catch (const PeerLost& lost) {
        noticed[static_cast<size_t>(rank)] = now_ns();
        EXPECT_EQ(lost.rank(), loss.victim) << lost.what();
        EXPECT_CONTAINS(lost.what(), text("rank ", loss.victim));
        EXPECT_THROW(barrier(), PeerLost);
      }
      return {};
    });
    while (started[0] + started[1] + started[2] + started[3] < kRanks) ::usleep(1000);
    const int64_t killed = now_ns();
    ranks.signal(loss.victim, SIGKILL);
    std::vector<std::string> after;
    for (int r = 0; r < kRanks; ++r) {
      const auto end = ranks.wait(r, patience());
      if (r == loss.victim) continue;
      EXPECT_TRUE(end.exited && end.status == 0) << "rank " << r << ": " << end.said << ", signal " << end.signal;
      after.push_back(text((noticed[static_cast<size_t>(r)] - killed) / 1'000'000));
    }
    std::printf("rank %d was killed %s; the others noticed it after %s ms\n", loss.victim,
                asleep ? "outside of a collective" : "in a collective", join(after, ", ").c_str());
  }
}

// The store stands still before a rank is killed. The others learn of the death all the same, and their Worlds end.
TEST(SilentStoreFork, NeitherADeathNorTheEndOfAWorldWaitsForIt) {
  for (const Loss& loss : {Loss{"shm", {}, 1}, {"gloo", {}, 1}, {"hierarchical", {"a", "a", "b"}, 2}}) {
    SCOPED_TRACE(loss.backend);
    constexpr int kRanks = 3, kStore = kRanks;
    const std::string name = text("@muster-test-", ::getpid(), "-", loss.backend);
    SharedNumbers started(kRanks), go(1), serves(1);
    ForkedRanks processes(kRanks + 1, [&](int rank) -> std::string {
      if (rank == kStore) {
        const auto server = serve_store(name);
        serves[0] = 1;
        for (;;) ::pause();
      }
      while (serves[0] == 0) ::usleep(1000);
      World world = comm::WorldStarter(loss.hosts)
                        .join({.rank = rank, .world_size = kRanks, .local_rank = rank, .local_world_size = kRanks},
                              connect_store("unix:" + name, patience()), options_of(loss.backend));
      const World::Scope scope(world);
      barrier();
      started[static_cast<size_t>(rank)] = 1;
      while (go[0] == 0) ::usleep(1000);
      try {
        for (;;) all_reduce(at::ones({2000}));
      } catch (const PeerLost& lost) {
        EXPECT_EQ(lost.rank(), loss.victim) << lost.what();
      }
      return {};
    });
    while (started[0] + started[1] + started[2] < kRanks) ::usleep(1000);
    processes.signal(kStore, SIGSTOP);
    go[0] = 1;
    processes.signal(loss.victim, SIGKILL);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == loss.victim) continue;
      const auto end = processes.wait(rank, patience());
      EXPECT_TRUE(end.exited && end.status == 0) << "rank " << rank << ": " << end.said << ", signal " << end.signal;
    }
  }
}

// Rank 0 serves the store, and nobody on another host can ask anyone once it is killed. They know by their connections.
TEST(StoreRankFork, ItsLossIsKnownBeforeAnOperationFails) {
  constexpr int kRanks = 3;
  const Hosts hosts = {"a", "b", "c"};
  const std::string name = text("@muster-test-", ::getpid(), "-rank-0");
  SharedNumbers serves(1), started(kRanks), knows(kRanks);
  ForkedRanks ranks(kRanks, [&](int rank) -> std::string {
    std::unique_ptr<StoreServer> server;
    if (rank == 0) {
      server = serve_store(name);
      serves[0] = 1;
    }
    while (serves[0] == 0) ::usleep(1000);
    World world =
        comm::WorldStarter(hosts).join({.rank = rank, .world_size = kRanks, .local_rank = 0, .local_world_size = 1},
                                       connect_store("unix:" + name, patience()), options_of("gloo"));
    const World::Scope scope(world);
    barrier();
    comm::Backend& backend = comm::backend_of(world.group());
    EXPECT_EQ(backend.known_failure(), nullptr);
    started[static_cast<size_t>(rank)] = 1;
    if (rank == 0)
      for (;;) ::pause();
    std::exception_ptr known;
    for (const auto limit = Deadline::after(kPatience); !known && !limit.passed(); ::usleep(1000))
      known = backend.known_failure();
    try {
      if (known) std::rethrow_exception(known);
      ADD_FAILURE() << "nothing is known";
    } catch (const PeerLost& lost) {
      EXPECT_EQ(lost.rank(), 0);
      EXPECT_CONTAINS(lost.what(), "is gone, and with it the store (");
      EXPECT_CONTAINS(lost.what(), text(" [seen by rank ", rank, "; last on rank ", rank, ": barrier #0"));
    }
    knows[static_cast<size_t>(rank)] = 1;
    while (knows[1] + knows[2] < 2) ::usleep(1000);  // a rank whose operation fails closes its connections, too
    EXPECT_THROW(barrier(), PeerLost);
    return {};
  });
  while (started[0] + started[1] + started[2] < kRanks) ::usleep(1000);
  ranks.signal(0, SIGKILL);
  for (const int rank : {1, 2}) {
    const auto end = ranks.wait(rank, patience());
    EXPECT_TRUE(end.exited && end.status == 0) << "rank " << rank << ": " << end.said << ", signal " << end.signal;
  }
}

// --- network namespaces ---

bool can_make_namespaces() {
  return Process({"/bin/sh", "-c", "ip netns add muster-probe && ip netns delete muster-probe"}).finish() == 0;
}

TEST(HostsProcess, NetworkNamespaces) {
  if (!can_make_namespaces()) GTEST_SKIP() << "needs ip(8) (apt-get install iproute2) and the right to make namespaces";
  const std::string one = text("muster-", ::getpid(), "-a"), two = text("muster-", ::getpid(), "-b");
  const auto shell = [](const std::string& script) { return Process({"/bin/sh", "-ec", script}).finish(); };
  struct Cleaner {
    std::string script;
    ~Cleaner() { Process({"/bin/sh", "-c", script}).finish(); }
  } cleaner{text("ip netns delete ", one, "; ip netns delete ", two)};
  ASSERT_EQ(shell(text("ip netns add ", one, "; ip netns add ", two, "; ip -n ", one,
                       " link add mu0 type veth peer name mu0 netns ", two, "; ip -n ", one,
                       " addr add 10.213.7.1/24 dev mu0; ip -n ", two, " addr add 10.213.7.2/24 dev mu0; ip -n ", one,
                       " link set mu0 up; ip -n ", two, " link set mu0 up; ip -n ", one, " link set lo up; ip -n ", two,
                       " link set lo up")),
            0);
  const auto start = [&](const std::string& space, int rank) {
    return std::make_unique<Process>(
        std::vector<std::string>{"/usr/bin/env", "ip", "netns", "exec", space, kWorldProgram},
        Process::Options{.env = {text("RANK=", rank), "WORLD_SIZE=3", text("LOCAL_RANK=", rank % 2),
                                 text("LOCAL_WORLD_SIZE=", rank < 2 ? 2 : 1), "MASTER_ADDR=10.213.7.1",
                                 "MASTER_PORT=29571"}});
  };
  const auto zero = start(one, 0), second = start(one, 1), far = start(two, 2);
  for (const auto& [process, line] : {std::pair{&zero, "rank 0 of 3, local 0 of 2, sum 6, backend hierarchical"},
                                      std::pair{&second, "rank 1 of 3, local 1 of 2, sum 6, backend hierarchical"},
                                      std::pair{&far, "rank 2 of 3, local 0 of 1, sum 6, backend hierarchical"}}) {
    EXPECT_EQ((*process)->finish(), 0) << (*process)->err;
    EXPECT_CONTAINS((*process)->out, line);
  }
}

}  // namespace
}  // namespace muster::test::faked_hosts
