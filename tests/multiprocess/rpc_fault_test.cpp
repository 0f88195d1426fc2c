// Remote calls among processes that die.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/file_text.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/remote/remote_call.h"
#include "muster/rpc/call.h"
#include "muster/rpc/rref.h"
#include "muster/rpc/this_call.h"
#include "muster/rpc/worker.h"
#include "rpc/agent/agent.h"
#include "support/forked.h"
#include "support/patience.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/ucx.h"

namespace muster::test {
namespace {

using namespace std::chrono_literals;
using rpc::RRef;

// Until the store's `key` has been counted up to `n`, or patience is at its end.
void await_count(Store& store, const std::string& key, int n) {
  for (const auto until = patience(); store.add(key, 0) < n && !until.passed();) std::this_thread::yield();
}

void for_ever() {
  World::current().store().add("serving", 1);
  while (!rpc::this_call().cancelled()) std::this_thread::yield();
}

struct Counter {
  int count() { return ++value; }
  int value = 0;
};

// The kernel says that a process has ended; all workers that wait for it know immediately. All that is under way with
// it, and all that comes later, fails.
void kill_a_called_worker(const rpc::Options& options, const std::string& how) {
  constexpr int kWorkers = 3, kVictim = 1;
  const auto before = leftovers();
  {
    const ForkedJob job;
    SharedNumbers noticed(kWorkers);
    ForkedRanks ranks(kWorkers, [&](int rank) -> std::string {
      World world = job.join(rank, kWorkers);
      const World::Scope scope(world);
      rpc::init(options);
      if (rank == kVictim) {
        world.store().get("never", patience());
        return "";
      }
      const auto object = rpc::remote<Counter>(kVictim);
      const auto result = rpc::remote<[] { return for_ever(), 1; }>(kVictim);
      const auto together = rpc::when_all(std::vector{rpc::async<[](int x) { return x; }>(2 - rank, 1),
                                                      rpc::async<[](int x) { return for_ever(), x; }>(kVictim, 1)});
      const auto call = rpc::async<&for_ever>(kVictim);
      try {
        call.get();
      } catch (const PeerLost& error) {
        noticed[static_cast<size_t>(rank)] = now_ns();
        EXPECT_FALSE(rpc::is_alive(kVictim));
        EXPECT_THROW(together.get(), PeerLost);
        EXPECT_THROW(result.to_here(), PeerLost);
        EXPECT_THROW(object.sync<&Counter::count>(), PeerLost);
        EXPECT_THROW(rpc::sync<[] {}>(kVictim), PeerLost);
        EXPECT_EQ(rpc::sync<[](int x) { return x + 1; }>(2 - rank, 1), 2);  // the survivors go on
        try {
          rpc::shutdown();
        } catch (const PeerLost&) {
          return error.what();
        }
      }
      return "no error";
    });
    await_count(*job.store(), "serving", 6);
    const int64_t killed = now_ns();
    ranks.signal(kVictim, SIGKILL);
    for (const int rank : {0, 2}) {
      const auto end = ranks.wait(rank, patience());
      EXPECT_TRUE(end.exited && end.status == 0) << end.said;
      EXPECT_CONTAINS(end.said, text("worker1 (pid ", ranks.pid(kVictim), ") ", how));
      std::printf("worker %d noticed the death after %.1f ms\n", rank,
                  static_cast<double>(noticed[static_cast<size_t>(rank)] - killed) / 1e6);
    }
  }
  EXPECT_EQ(leftovers(), before);
}

TEST(RpcFaultProcess, AKilledWorkerFailsTheCallsToIt) { kill_a_called_worker({}, "died"); }
TEST(RpcFaultProcess, AKilledWorkerFailsTheCallsToItOverTcp) { kill_a_called_worker({.transport = "tcp"}, ""); }
TEST(RpcFaultProcess, AKilledWorkerFailsTheCallsToItOverUcx) {
  if (const std::string why = why_no_ucx(); !why.empty()) GTEST_SKIP() << why;
  kill_a_called_worker({.transport = "ucx"}, "is lost: ");
}

// The handler runs until the death of its caller has cancelled the call, which has no timeout.
TEST(RpcFaultProcess, TheCallsOfAKilledWorkerAreCancelled) {
  constexpr int kVictim = 0;
  static constexpr auto serve = [] {
    for_ever();
    World::current().store().set("cancelled", rpc::this_call().caller().name);
  };
  const ForkedJob job;
  ForkedRanks ranks(2, [&](int rank) -> std::string {
    World world = job.join(rank, 2);
    const World::Scope scope(world);
    rpc::init();
    if (rank == kVictim) rpc::sync<serve>({1, {.timeout = 0ms}});
    const std::string caller = world.store().get("cancelled", patience());
    EXPECT_FALSE(rpc::is_alive(kVictim));
    rpc::shutdown(rpc::Shutdown::kAbrupt);
    return caller;
  });
  await_count(*job.store(), "serving", 1);
  ranks.signal(kVictim, SIGKILL);
  const auto end = ranks.wait(1, patience());
  EXPECT_TRUE(end.exited && end.status == 0) << end.said;
  EXPECT_EQ(end.said, "worker0");
  ranks.wait(kVictim, patience());
}

// A stopped worker is not a dead one: calls to it time out.
TEST(RpcFaultProcess, AStoppedWorkerTimesOut) {
  const ForkedJob job;
  ForkedRanks ranks(2, [&](int rank) -> std::string {
    World world = job.join(rank, 2);
    const World::Scope scope(world);
    rpc::init();
    if (rank == 1) {
      ::raise(SIGSTOP);
      return "";
    }
    std::string said;
    try {
      for (;;) rpc::sync<[] {}>({1, {.timeout = 200ms}});
    } catch (const TimeoutError& error) {
      said = error.what();
    }
    rpc::shutdown(rpc::Shutdown::kAbrupt);
    return said;
  });
  const auto end = ranks.wait(0, patience());
  EXPECT_TRUE(end.exited && end.status == 0) << end.said;
  EXPECT_CONTAINS(end.said, "worker1");
  ranks.signal(1, SIGKILL);
  ranks.wait(1, patience());
}

// Between hosts nobody tells that a worker has stopped: its silence does. Then it counts as lost, and a call without a
// timeout fails.
TEST(RpcFaultProcess, SilenceBetweenHostsIsALoss) {
  const ForkedJob job;
  ForkedRanks ranks(2, [&](int rank) -> std::string {
    World world = job.join(rank, 2, {}, {"a", "b"});
    const World::Scope scope(world);
    rpc::init({.heartbeat = 500ms});
    if (rank == 1) {
      world.store().get("never", patience());
      return "";
    }
    const std::string said = message_of<PeerLost>([] { rpc::sync<&for_ever>({1, {.timeout = 0ms}}); });
    EXPECT_FALSE(rpc::is_alive(1));
    rpc::shutdown(rpc::Shutdown::kAbrupt);
    return said;
  });
  await_count(*job.store(), "serving", 1);
  ranks.signal(1, SIGSTOP);
  const auto end = ranks.wait(0, patience());
  EXPECT_TRUE(end.exited && end.status == 0) << end.said;
  EXPECT_CONTAINS(end.said, "worker1");
  EXPECT_CONTAINS(end.said, "nothing was heard of it for ");
  ranks.signal(1, SIGKILL);
  ranks.wait(1, patience());
}

// A rank that does not come is named. Then there is nothing to shut down, and all ranks may try again.
TEST(RpcFaultProcess, AnInitThatFailsLeavesNothing) {
  const auto before = leftovers();
  {
    const ForkedJob job;
    ForkedRanks ranks(3, [&](int rank) -> std::string {
      World world = job.join(rank, 3, {.timeout = rank == 1 ? kPatience : 500ms});
      const World::Scope scope(world);
      std::string said;
      if (rank == 1) {
        await_count(world.store(), "failed", 2);
        return said;
      }
      said = message_of<TimeoutError>([] { rpc::init(); });
      EXPECT_FALSE(rpc::is_running());
      rpc::shutdown();
      EXPECT_THROW(rpc::sync<[] {}>(1), Aborted);
      world.store().add("failed", 1);
      return said;
    });
    for (const int rank : {0, 2}) {
      const auto end = ranks.wait(rank, patience());
      EXPECT_TRUE(end.exited && end.status == 0) << end.said;
      EXPECT_CONTAINS(end.said, "rank 1");
    }
    ranks.wait(1, patience());
  }
  EXPECT_EQ(leftovers(), before);
}

void until_released() {
  World::current().store().add("serving", 1);
  World::current().store().get("release", patience());  // which looks at no cancellation
}

// Nothing can end a thread. So the end of RPC waits, and says for what.
TEST(RpcFaultProcess, AHandlerThatDoesNotEndIsNamed) {
  const TemporaryFolder folder;
  const auto log = folder.path() / "stderr";
  const ForkedJob job;
  ForkedRanks ranks(2, [&](int rank) -> std::string {
    World world = job.join(rank, 2);
    const World::Scope scope(world);
    rpc::init();
    if (rank == 0) {
      const auto call = rpc::async<&until_released>(1);
      const std::string said = message_of<PeerLost>([&] { call.get(); });
      rpc::shutdown(rpc::Shutdown::kAbrupt);
      return said;
    }
    EXPECT_NE(std::freopen(log.c_str(), "w", stderr), nullptr);
    await_count(world.store(), "serving", 1);
    rpc::shutdown(rpc::Shutdown::kAbrupt);
    return "ended";
  });
  std::string said;
  for (const auto until = patience(); !contains(said, "cancelled()") && !until.passed(); std::this_thread::yield())
    said = std::filesystem::exists(log) ? text_of_file(log) : "";
  EXPECT_CONTAINS(said, "the end of RPC waits until handlers have ended: ");
  EXPECT_CONTAINS(said, "until_released");
  EXPECT_CONTAINS(said, " for worker \"worker0\"");
  job.store()->set("release", "");
  for (const int rank : {0, 1}) {
    const auto end = ranks.wait(rank, patience());
    EXPECT_TRUE(end.exited && end.status == 0) << end.said;
    EXPECT_CONTAINS(end.said, rank == 1 ? "ended" : "worker1");
  }
}

// Of a call in parts: who died is named, and the others hear that nobody waits for theirs.
void ends_in_part_2(int signal, at::Tensor part) {
  if (part.item<int64_t>() != 2) return for_ever();
  await_count(World::current().store(), "serving", 2);
  ::raise(signal);
}
TEST(RpcFaultProcess, AWorkerThatDiesOrStopsFailsTheCallThatHasAPartThere) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    constexpr int kWorkers = 3, kVictim = 2;
    const ForkedJob job;
    ForkedRanks ranks(kWorkers, [&](int rank) -> std::string {
      World world = job.join(rank, kWorkers);
      const World::Scope scope(world);
      rpc::init();
      std::string said;
      if (rank == 0) {
        try {
          remote_sync_call<&ends_in_part_2>(signal, at::arange(3), {.timeout = signal == SIGSTOP ? 1s : kPatience});
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), signal == SIGSTOP ? ErrorCode::kTimeout : ErrorCode::kPeerLost);
          said = error.what();
        }
        const auto until = patience();  // the handlers of the other parts have ended
        while (!until.passed() && rpc::sync<[] { return rpc::census().running_handlers; }>(1) > 1)
          std::this_thread::yield();
        EXPECT_FALSE(until.passed());
        EXPECT_EQ(remote_sync_call<[](at::Tensor rows) { return rows.size(0); }>(
                      at::arange(4), {.partitioner = dim_partitioner(0, {.workers = {0, 1}})}),
                  (std::vector<int64_t>{2, 2}));
        world.store().set("over", "");
      } else {
        world.store().get("over", patience());
      }
      rpc::shutdown(rpc::Shutdown::kAbrupt);
      return said;
    });
    const auto end = ranks.wait(0, patience());
    EXPECT_TRUE(end.exited && end.status == 0) << end.said;
    EXPECT_CONTAINS(end.said, " of 3]");
    if (signal == SIGKILL) {
      EXPECT_CONTAINS(end.said, text("worker2 (pid ", ranks.pid(kVictim), ") died"));
    }
    ranks.wait(1, patience());
    ranks.signal(kVictim, SIGKILL);
    ranks.wait(kVictim, patience());
  }
}

class Box {
 public:
  int touch() {
    const std::lock_guard lock(mutex_);
    return ++touched_;
  }

 private:
  std::mutex mutex_;
  int touched_ = 0;
};

// What each worker holds of others' objects.
struct Shelf {
  std::mutex mutex;
  std::vector<RRef<Box>> boxes;
};
Shelf& shelf() {
  static Shelf mine;  // one worker per process here
  return mine;
}
void put(std::vector<RRef<Box>> boxes) {
  const std::lock_guard lock(shelf().mutex);
  for (auto& box : boxes) shelf().boxes.push_back(std::move(box));
}

// Worker 2 has one made at worker 1, whose only thread is busy, hands it to worker 0, and dies.
TEST(RpcFaultProcess, AnObjectIsMadeThoughItsCreatorWasLostBefore) {
  constexpr int kOwner = 1, kCreator = 2;
  static constexpr auto held = [] {
    World::current().store().set("held", "");
    World::current().store().get("go", patience());
  };
  const ForkedJob job;
  ForkedRanks ranks(3, [&](int rank) -> std::string {
    World world = job.join(rank, 3);
    const World::Scope scope(world);
    rpc::init({.max_threads = 1});
    int touched = 0;
    if (rank == 0) {
      const auto busy = rpc::async<held>(kOwner);
      world.store().get("lost", patience());
      world.store().set("go", "");
      busy.get();
      touched = shelf().boxes.at(0).sync<&Box::touch>();
      world.store().set("over", "");
    } else if (rank == kCreator) {
      world.store().get("held", patience());
      rpc::sync<&put>(0, std::vector{rpc::remote<Box>(kOwner)});
      ::raise(SIGKILL);
    } else {
      for (const auto end = patience(); rpc::is_alive(kCreator) && !end.passed();) std::this_thread::yield();
      world.store().set("lost", "");
      world.store().get("over", patience());
    }
    rpc::shutdown(rpc::Shutdown::kAbrupt);
    return text("touched ", touched);
  });
  const auto end = ranks.wait(0, patience());
  EXPECT_EQ(end.said, "touched 1");
  ranks.wait(kOwner, patience());
  ranks.wait(kCreator, patience());
}

// References wander at random among five workers while one of them is killed. No object is freed early (a call on one
// whose owner lives always works), and when all have let go none is left anywhere.
void kill_while_references_wander(const rpc::Options& options) {
  constexpr int kWorkers = 5;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    const int victim = static_cast<int>(std::mt19937(seed)() % kWorkers);
    const ForkedJob job;
    ForkedRanks ranks(kWorkers, [&](int rank) -> std::string {
      World world = job.join(rank, kWorkers);
      const World::Scope scope(world);
      rpc::init(options);
      std::mt19937 dice(seed * 100 + static_cast<unsigned>(rank));
      int freed_early = 0, steps = 0;
      std::string early;
      // On until some time after the death; the victim, until it is killed.
      for (int after = 0; after < 100; ++steps) {
        if (!rpc::is_alive(victim)) ++after;
        if (steps == 100) world.store().add("warm", 1);
        try {
          const int to = static_cast<int>(dice() % kWorkers);
          std::vector<RRef<Box>> some;
          some.push_back(rpc::remote<Box>(static_cast<int>(dice() % kWorkers)));
          {
            const std::lock_guard lock(shelf().mutex);
            auto& boxes = shelf().boxes;
            while (boxes.size() > 20) {
              std::swap(boxes[dice() % boxes.size()], boxes.back());
              boxes.pop_back();
            }
            for (int i = 0; i < 3 && !boxes.empty(); ++i) some.push_back(boxes[dice() % boxes.size()]);
          }
          const auto sent = rpc::async<&put>(to, some);
          some.back().sync<&Box::touch>();
          sent.get();
        } catch (const PeerLost&) {
        } catch (const RemoteError& error) {
          ++freed_early;
          early = error.what();
        }
      }
      // Others may still put, also when they are done: a call that nobody waited for is on its way.
      const auto let_go = [] {
        std::vector<RRef<Box>> last;
        const std::lock_guard lock(shelf().mutex);
        last.swap(shelf().boxes);
      };
      const auto end = patience();
      while (rpc::census().owned_objects != 0 && !end.passed()) {
        let_go();
        std::this_thread::yield();
      }
      const auto left = rpc::census().owned_objects;
      if (left != 0) early += rpc::current_agent()->objects().describe();
      world.store().add("empty", 1);
      for (const auto until = patience(); world.store().add("empty", 0) < kWorkers - 1 && !until.passed();) let_go();
      rpc::shutdown(rpc::Shutdown::kAbrupt);
      return text(left, " left, ", freed_early, " freed early ", early);
    });
    await_count(*job.store(), "warm", kWorkers);
    ranks.signal(victim, SIGKILL);
    for (int rank = 0; rank < kWorkers; ++rank) {
      const auto end = ranks.wait(rank, patience());
      if (rank == victim) continue;
      EXPECT_EQ(end.said, "0 left, 0 freed early ") << "seed " << seed << ", worker " << rank << ", victim " << victim;
    }
  }
}

TEST(RpcFaultProcess, ReferencesWanderWhileAWorkerIsKilled) { kill_while_references_wander({}); }
TEST(RpcFaultProcess, ReferencesWanderOverTcpWhileAWorkerIsKilled) {
  kill_while_references_wander({.transport = "tcp"});
}

}  // namespace
}  // namespace muster::test
