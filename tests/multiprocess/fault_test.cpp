// Faults: a rank is killed, stopped, delayed or corrupted at each phase of each collective, or killed at any moment;
// the others must be told who it was, and nothing may hang or stay behind.

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <signal.h>

#include <random>

#include "base/text.h"
#include "comm/core/backend.h"
#include "comm/world/world_starter.h"
#include "muster/comm/collectives.h"
#include "support/asleep.h"
#include "support/fault_calls.h"
#include "support/forked.h"
#include "support/full_run.h"
#include "support/patience.h"
#include "support/patterns.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using std::chrono::milliseconds;

using Hosts = std::vector<std::string>;  // by rank; empty: all on this one

constexpr int kRanks = 3;
constexpr int64_t kSmall = 5, kLarge = 300'000;

// No timeout passes while a test runs: who is told of a loss is told of it because of the loss.
WorldOptions with(Fault fault) {
  WorldOptions options;
  options.faults.add(std::move(fault));
  options.timeout = 2 * kPatience;
  return options;
}

// Calls until `stops`, in which the victim stops, and that one with little time: only the victim is missing then.
std::string stop_of(World& world, int64_t count, int stops) {
  for (int i = 0; i < stops; ++i) kCalls[0].run(world, count);
  if (world.rank() != kVictim) comm::backend_of(world.group()).setTimeout(milliseconds(400));
  return message_of<TimeoutError>([&] {
    // In the last phase the victim stops when the others have what they need from it: the next call shows it.
    for (int i = 0; i < 2; ++i) kCalls[0].run(world, count);
  });
}

// Calls again and again until it is told that somebody is lost; returns who, in words, "" where it never is.
std::string until_lost(World& world, const Call& call, int64_t count) {
  for (int i = 0; i < 1000; ++i) try {
      call.run(world, count);
    } catch (const PeerLost& lost) {
      EXPECT_THROW(barrier(), PeerLost);
      return text("rank ", lost.rank(), ": ", lost.what());
    }
  return {};
}

template <typename Fn>
void for_all_calls(Fn fn) {
  for (const auto& [phase, phase_name] : kPhases)
    for (const int64_t count : {kSmall, kLarge}) {
      for (const auto& call : kCalls) {
        SCOPED_TRACE(testing::Message() << call.name << ", " << count << " elements, phase " << phase_name);
        fn(call, count, phase);
      }
      if (count == kSmall) {
        SCOPED_TRACE(testing::Message() << "barrier, phase " << phase_name);
        fn(kBarrier, count, phase);
      }
    }
}

// --- ranks as threads ---

// All ranks are told that the victim was killed; the victim itself, too.
void expect_killed(const Call& call, int64_t count, const WorldOptions& options, const Hosts& hosts = {}) {
  comm::WorldStarter(hosts).run_threads(
      kRanks,
      [&](World& world) {
        EXPECT_CONTAINS(
            until_lost(world, call, count),
            text("rank 1: rank 1 ended: killed by its FaultPlan [seen by rank 1; last on rank ", world.rank(), ": "));
      },
      options);
}

TEST(Fault, KillAtEachPhase) {
  for_all_calls([](const Call& call, int64_t count, FaultPhase phase) {
    expect_killed(call, count, with({.action = FaultAction::kKill, .rank = kVictim, .operation = 2, .phase = phase}));
  });
}

// Ten operations, of which those from the third on have less time than coming together may take.
void reduce_on(World& world, int64_t count) {
  for (int i = 0; i < 10; ++i) {
    if (i == 3) comm::backend_of(world.group()).setTimeout(milliseconds(400));
    kCalls[0].run(world, count);
  }
}

TEST(Fault, StopIsTimeoutNamingIt) {
  for (const auto& [phase, name] : kPhases)
    for (const int64_t count : {kSmall, kLarge}) {
      SCOPED_TRACE(testing::Message() << name << ", " << count);
      run_threads(
          kRanks,
          [&](World& world) {
            const std::string said = stop_of(world, count, 3);
            EXPECT_CONTAINS(said, "rank 1");
            EXPECT_CONTAINS(said, "timed out");
          },
          with({.action = FaultAction::kStop, .rank = kVictim, .operation = 3, .phase = phase}));
    }
}

// The victim's second all_reduce takes at least as long as it is delayed by, in each phase; the results are right.
void expect_delayed(const std::string& backend, const Hosts& hosts = {}) {
  constexpr milliseconds kDelay{60};
  for (const auto& [phase, name] : kPhases) {
    SCOPED_TRACE(name);
    auto options =
        with({.action = FaultAction::kDelay, .rank = kVictim, .operation = 1, .phase = phase, .delay = kDelay});
    options.backend = backend;
    comm::WorldStarter(hosts).run_threads(
        kRanks,
        [&](World& world) {
          for (int operation = 0; operation < 3; ++operation) {
            const auto began = Clock::now();
            const at::Tensor t = mine(world, kLarge);
            all_reduce(t);
            EXPECT_EQ(difference(t, reduced_table(at::kFloat, ReduceOp::SUM, kRanks), 0), "");
            if (operation == 1 && world.rank() == kVictim) {
              EXPECT_GE(Clock::now() - began, kDelay);
            }
          }
        },
        options);
  }
}

TEST(Fault, DelayDelays) { expect_delayed("auto"); }

// So that a suite that compares results can be seen to fail.
TEST(Fault, CorruptChangesTheResult) {
  for (const int64_t count : {kSmall, int64_t{3000}, kLarge})
    for (const auto& call : kCalls) {
      SCOPED_TRACE(testing::Message() << call.name << ", " << count);
      std::vector<at::Tensor> right(kRanks), wrong(kRanks);
      const auto into = [&](std::vector<at::Tensor>& results) {
        return [&](World& world) {
          barrier();
          results[static_cast<size_t>(world.rank())] = call.run(world, count).clone();
          barrier();
        };
      };
      run_threads(kRanks, into(right));
      for (const int victim : {kVictim, 0}) {
        const std::string_view name = call.name;  // in these rank 0 has nothing that others get, or not from it
        if (victim == 0 && (name == "broadcast" || name == "scatter" || name == "gather")) continue;
        run_threads(kRanks, into(wrong), with({.action = FaultAction::kCorrupt, .rank = victim, .operation = 1}));
        bool differs = false;
        for (size_t r = 0; r < kRanks; ++r) differs = differs || !at::equal(right[r], wrong[r]);
        EXPECT_TRUE(differs) << "rank " << victim;
        if (!name.starts_with("all_reduce")) continue;
        for (size_t r = 1; r < kRanks; ++r) EXPECT_TRUE(at::equal(wrong[0], wrong[r])) << "the ranks differ";
      }
    }
}

TEST(Fault, ConcernsOnlyItsGroup) {
  run_threads(
      kRanks,
      [](World& world) {
        const Group first = world.new_group({2, 1, 0}), second = world.new_group({0, 1, 2});
        for (int i = 0; i < 3; ++i) all_reduce(at::ones({3}), {.group = second});
        for (int i = 0; i < 3; ++i) barrier();
        all_reduce(at::ones({3}), {.group = first});
        EXPECT_THROW(all_reduce(at::ones({3}), {.group = first}), PeerLost);
        barrier();
      },
      with({.action = FaultAction::kKill, .rank = kVictim, .operation = 1, .group = "group 1"}));
}

// The others are told that they waited in vain for the victim, which is told of some error.
void expect_stopped(const WorldOptions& options, const Hosts& hosts = {}) {
  comm::WorldStarter(hosts).run_threads(
      kRanks,
      [](World& world) {
        if (world.rank() == kVictim) {
          EXPECT_THROW(reduce_on(world, kSmall), Error);
          return;
        }
        const std::string said = message_of<TimeoutError>([&] { reduce_on(world, kSmall); });
        EXPECT_CONTAINS(said, "rank 1");
        EXPECT_CONTAINS(said, "timed out");
      },
      options);
}

// What a forked rank does: it reduces until an error ends it, and says which.
std::string reduce_until_error(const ForkedJob& job, int rank, const WorldOptions& options, const Hosts& hosts = {}) {
  World world = job.join(rank, kRanks, options, hosts);
  const World::Scope scope(world);
  try {
    for (int i = 0; i < 1000; ++i) all_reduce(mine(world, kSmall));
  } catch (const Error& error) {
    return text(to_string(error.code()), ": ", error.what());
  }
  return "nothing was thrown";
}

// The others have ended by themselves, and what they said names the victim's process and contains `word`.
void expect_said(ForkedRanks& ranks, const std::string& word) {
  for (const int rank : {0, 2}) {
    const auto end = ranks.wait(rank, patience());
    EXPECT_TRUE(end.exited && end.status == 0) << "rank " << rank << ": " << end.said << ", signal " << end.signal;
    EXPECT_CONTAINS(end.said, text("rank 1 (pid ", ranks.pid(kVictim), ")"));
    EXPECT_CONTAINS(end.said, word);
  }
}

// --- over several hosts, where an operation is made of steps ---

TEST(FaultHosts, KillAtEachPhase) {
  // The victim leads no host, another's, or is alone on its own.
  for (const auto& hosts : {Hosts{"a", "a", "b"}, {"a", "b", "b"}, {"a", "b", "a"}})
    for (const auto& [phase, name] : kPhases)
      for (const auto& call : kCalls) {
        SCOPED_TRACE(testing::Message() << join(hosts) << ": " << call.name << ", phase " << name);
        expect_killed(call, kSmall,
                      with({.action = FaultAction::kKill, .rank = kVictim, .operation = 2, .phase = phase}), hosts);
      }
}

TEST(FaultHosts, StopIsTimeoutNamingIt) {
  // Alone on its host, or beside the leader whom the other host waits for.
  for (const auto& hosts : {Hosts{"a", "b", "a"}, {"a", "a", "b"}})
    for (const auto& [phase, name] : kPhases) {
      SCOPED_TRACE(testing::Message() << join(hosts) << ", phase " << name);
      expect_stopped(with({.action = FaultAction::kStop, .rank = kVictim, .operation = 3, .phase = phase}), hosts);
    }
}

TEST(FaultHosts, DelayDelays) { expect_delayed("auto", {"a", "a", "b"}); }

TEST(FaultHostsProcess, KillAndStopAtEachPhase) {
  for (const auto action : {FaultAction::kKill, FaultAction::kStop})
    for (const auto& [phase, name] : kPhases) {
      SCOPED_TRACE(testing::Message() << (action == FaultAction::kKill ? "kill, " : "stop, ") << name);
      const ForkedJob job;
      ForkedRanks ranks(kRanks, [&, phase = phase](int rank) {
        auto options = with({.action = action, .rank = kVictim, .operation = 2, .phase = phase});
        if (action == FaultAction::kStop) options.timeout = milliseconds(1500);
        return reduce_until_error(job, rank, options, {"a", "b", "a"});
      });
      expect_said(ranks, action == FaultAction::kKill ? "PeerLost" : "TimeoutError");
      if (action == FaultAction::kStop) ranks.signal(kVictim, SIGKILL);
      EXPECT_EQ(ranks.wait(kVictim, patience()).signal, SIGKILL);
    }
}

// --- over a wire ---

WorldOptions on_gloo(WorldOptions options) {
  options.backend = "gloo";
  return options;
}

TEST(FaultWire, KillAtEachPhase) {
  for (const auto& [phase, name] : kPhases)
    for (const auto& call : kCalls) {
      SCOPED_TRACE(testing::Message() << call.name << ", phase " << name);
      expect_killed(call, kSmall,
                    on_gloo(with({.action = FaultAction::kKill, .rank = kVictim, .operation = 2, .phase = phase})));
    }
}

TEST(FaultWire, StopIsTimeoutNamingIt) {
  for (const auto& [phase, name] : kPhases) {
    SCOPED_TRACE(name);
    expect_stopped(on_gloo(with({.action = FaultAction::kStop, .rank = kVictim, .operation = 3, .phase = phase})));
  }
}

TEST(FaultWire, DelayDelays) { expect_delayed("gloo"); }

TEST(FaultWireProcess, KillAtEachPhase) {
  for (const auto& [phase, name] : kPhases) {
    SCOPED_TRACE(name);
    const ForkedJob job;
    ForkedRanks ranks(kRanks, [&, phase = phase](int rank) {
      return reduce_until_error(
          job, rank, on_gloo(with({.action = FaultAction::kKill, .rank = kVictim, .operation = 2, .phase = phase})));
    });
    expect_said(ranks, text("PeerLost: rank 1 (pid ", ranks.pid(kVictim), ")"));
    EXPECT_EQ(ranks.wait(kVictim, patience()).signal, SIGKILL);
  }
}

TEST(FaultPlan, Parse) {
  const auto plan = FaultPlan::parse(
      "kill:rank=1,operation=5;delay:rank=0,operation=9,ms=200,phase=middle,group=group 2;stop:;corrupt:rank=3");
  ASSERT_EQ(plan.faults().size(), 4u);
  EXPECT_EQ(plan.faults()[0].action, FaultAction::kKill);
  EXPECT_EQ(plan.faults()[0].rank, 1);
  EXPECT_EQ(plan.faults()[0].operation, 5u);
  EXPECT_EQ(plan.faults()[0].phase, FaultPhase::kStart);
  EXPECT_EQ(plan.faults()[0].group, "world");
  EXPECT_EQ(plan.faults()[1].action, FaultAction::kDelay);
  EXPECT_EQ(plan.faults()[1].delay, milliseconds(200));
  EXPECT_EQ(plan.faults()[1].phase, FaultPhase::kMiddle);
  EXPECT_EQ(plan.faults()[1].group, "group 2");
  EXPECT_EQ(plan.faults()[2].action, FaultAction::kStop);
  EXPECT_EQ(plan.faults()[3].action, FaultAction::kCorrupt);
  EXPECT_TRUE(FaultPlan::parse("").empty());
  for (const char* bad : {"explode:rank=1", "kill", "kill:rank", "kill:rank=x", "kill:rank=1x", "kill:operation=-1",
                          "kill:phase=late", "kill:when=now", "kill:rank=99999999999", ":rank=1", "delay:ms=1.5"})
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { FaultPlan::parse(bad); }), "a fault: expected action:key=value")
        << bad;
}

// --- ranks as processes ---

TEST(FaultProcess, KillAtEachPhase) {
  const auto before = leftovers();
  for_all_calls([&](const Call& call, int64_t count, FaultPhase phase) {
    const ForkedJob job;
    ForkedRanks ranks(kRanks, [&](int rank) {
      World world =
          job.join(rank, kRanks, with({.action = FaultAction::kKill, .rank = kVictim, .operation = 2, .phase = phase}));
      const World::Scope scope(world);
      return until_lost(world, call, count);
    });
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto end = ranks.wait(rank, patience());
      if (rank == kVictim) {
        EXPECT_EQ(end.signal, SIGKILL) << end.said;
        continue;
      }
      EXPECT_TRUE(end.exited && end.status == 0) << "rank " << rank << ": " << end.said << ", signal " << end.signal;
      EXPECT_CONTAINS(end.said, text("rank 1: rank 1 (pid ", ranks.pid(kVictim), ") died"));
    }
  });
  EXPECT_EQ(leftovers(), before);
}

TEST(FaultProcess, StopIsTimeoutNamingIt) {
  const ForkedJob job;
  ForkedRanks ranks(kRanks, [&](int rank) {
    World world =
        job.join(rank, kRanks,
                 with({.action = FaultAction::kStop, .rank = kVictim, .operation = 1, .phase = FaultPhase::kPosted}));
    const World::Scope scope(world);
    return stop_of(world, kLarge, 1);
  });
  for (const int rank : {0, 2}) {
    const auto end = ranks.wait(rank, patience());
    EXPECT_TRUE(end.exited && end.status == 0) << end.said;
    EXPECT_CONTAINS(end.said, text("rank 1 (pid ", ranks.pid(kVictim)));
  }
  ranks.signal(kVictim, SIGCONT);  // it goes on, and is told what happened
  EXPECT_CONTAINS(ranks.wait(kVictim, patience()).said, "timed out");
}

// SIGKILL from outside, at any moment of a loop of all_reduce: of one rank, or of the whole job from its start on.
TEST(FaultProcess, SigkillAtRandomMoments) {
  const int times = full_run() ? 200 : 60;
  const auto before = leftovers();
  std::mt19937 random(20240607);
  for (int time = 0; time < times; ++time) {
    SCOPED_TRACE(time);
    const bool everybody = time % 4 == 3;
    const int victim = static_cast<int>(random() % kRanks);
    const int64_t count = int64_t{1} << (random() % 21);
    const Call& call = kCalls[random() % 3];
    const ForkedJob job;
    const SharedNumbers numbers(kRanks);  // operations done
    ForkedRanks ranks(kRanks, [&](int rank) {
      World world = job.join(rank, kRanks);
      const World::Scope scope(world);
      try {
        for (;; ++numbers[static_cast<size_t>(rank)]) call.run(world, count);
      } catch (const PeerLost& lost) {
        return text("rank ", lost.rank(), ": ", lost.what());
      }
    });
    if (everybody) {
      ::usleep(static_cast<useconds_t>(random() % 30'000));  // any moment: this is the test, not a synchronisation
      for (int rank = 0; rank < kRanks; ++rank) ranks.signal(rank, SIGKILL);
      EXPECT_EQ(ranks.wait(0, patience()).signal, SIGKILL);
      for (int rank = 1; rank < kRanks; ++rank)
        ranks.wait(rank, patience());  // which rank 0's death may have ended first
      continue;
    }
    for (int rank = 0; rank < kRanks; ++rank)
      for (const auto deadline = patience(); numbers[static_cast<size_t>(rank)] < 3 && !deadline.passed();)
        ::usleep(100);
    ::usleep(static_cast<useconds_t>(random() % 5000));
    ranks.signal(victim, SIGKILL);
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto end = ranks.wait(rank, patience());
      if (rank == victim) {
        EXPECT_EQ(end.signal, SIGKILL) << end.said;
        continue;
      }
      EXPECT_TRUE(end.exited && end.status == 0) << "rank " << rank << ": " << end.said << ", signal " << end.signal;
      EXPECT_CONTAINS(end.said, text("rank ", victim, ": rank ", victim, " (pid ", ranks.pid(victim), ") died"));
    }
  }
  EXPECT_EQ(leftovers(), before);
}

TEST(FaultProcess, MessagesFromAKilledRank) {
  const std::vector<std::function<void()>> calls = {
      [] { recv(at::ones({10}), kVictim); }, [] { irecv(at::ones({10}), kVictim).wait(); },
      [] { send(at::ones({100'000}), kVictim); }, [] { isend(at::ones({100'000}), kVictim).wait(); }};
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    const ForkedJob job;
    ForkedRanks ranks(2, [&](int rank) {
      World world = job.join(rank, 2);
      const World::Scope scope(world);
      if (rank == kVictim) {
        world.store().set("here", "1");
        world.store().get("nobody sets this", patience());
      }
      world.store().get("here", patience());
      const OnceAsleep watch([&] { world.store().set("waiting", "1"); });
      try {
        calls[i]();
      } catch (const PeerLost& lost) {
        return std::string(lost.what());
      }
      return std::string("nothing was thrown");
    });
    job.store()->get("waiting", patience());
    ranks.signal(kVictim, SIGKILL);
    EXPECT_CONTAINS(ranks.wait(0, patience()).said, text("rank 1 (pid ", ranks.pid(kVictim), ") died"));
  }
}

}  // namespace
}  // namespace muster::test
