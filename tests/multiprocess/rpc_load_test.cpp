// Remote calls where nobody calls, where all call all, and where a million are made: time, memory, and an end.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/text.h"
#include "muster/comm/collectives.h"
#include "muster/rpc/call.h"
#include "muster/rpc/worker.h"
#include "support/patience.h"
#include "support/ranks.h"
#include "transport/shm/inbox.h"

namespace muster::test {
namespace {

using namespace std::chrono_literals;
using at::Tensor;
using std::chrono::duration_cast;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

class RpcSleep : public CommContract {
 protected:
  void serve(int n, const std::function<void(World&)>& body) const {
    run(n, [&](World& world) {
      rpc::init();
      body(world);
      rpc::shutdown();
    });
  }
};
class RpcLoad : public RpcSleep {};

int plus(int a, int b) { return a + b; }
// A handler that blocks its thread, as users' do, until somebody says go.
int until_told(int number) {
  World::current().store().get(text("go", number), patience());
  return number;
}

// Longer than any thread looks around before it sleeps.
void let_all_fall_asleep() { std::this_thread::sleep_for(30ms); }

// What the threads of the library have taken in this process. Gloo's, which the hierarchical backend has between hosts,
// look around every 10 ms.
nanoseconds cpu_time() {
  nanoseconds sum{0};
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(thread.path() / "comm"), name);
    if (name.rfind("rpc ", 0) != 0 && name.rfind("muster-", 0) != 0) continue;
    int64_t ns = 0;
    std::ifstream(thread.path() / "schedstat") >> ns;
    sum += nanoseconds(ns);
  }
  return sum;
}

// --- asleep ---

// At most a thousandth of a core for a worker. One of one host takes next to nothing (0.001 % were measured); one of
// several hosts beats to each of the others.
TEST_P(RpcSleep, IdleWorkersTakeNoTime) {
  constexpr int kWorkers = 4;
  constexpr nanoseconds kWatched = 2s;
  serve(kWorkers, [&](World&) {
    for (int to = 0; to < kWorkers; ++to) EXPECT_EQ(rpc::sync<&plus>(to, 1, 2), 3);
    barrier();
    std::this_thread::sleep_for(200ms);
    const auto before = cpu_time();
    std::this_thread::sleep_for(kWatched);
    const auto spent = cpu_time() - before;
    const int watched = as_threads() ? kWorkers : 1;
    EXPECT_GT(cpu_time().count(), 0);
    EXPECT_LE(spent, kWatched / 1000 * watched) << duration_cast<std::chrono::microseconds>(spent).count() << " us";
    barrier();  // the end of one would wake the others while these still measure
  });
}

// Nobody looks after the first handler behind a sleep but those who come after it.
TEST_P(RpcSleep, ASlowHandlerBehindASleepHoldsUpNobody) {
  serve(2, [](World& world) {
    for (int i = 0; i < 3; ++i) {
      barrier();
      let_all_fall_asleep();
      if (world.rank() != 0) continue;
      auto slow = rpc::async<&until_told>(1, i);
      if (i % 2) std::this_thread::sleep_for(5ms);  // the other is in the handler, or not yet awake
      EXPECT_EQ(rpc::sync<&plus>(1, 1, 1), 2);
      world.store().set(text("go", i), "");
      EXPECT_EQ(std::move(slow).get(), i);  // had the other waited for it, it would have thrown
    }
  });
}

// The deadline of a call is kept by a worker that sleeps, and by one whose thread has just begun with a slow handler.
TEST_P(RpcSleep, DeadlinesAreKept) {
  serve(2, [](World& world) {
    const int other = 1 - world.rank();
    for (const bool busy : {false, true}) {
      barrier();
      let_all_fall_asleep();
      const int first = busy ? 2 : 0, second = first + 1;
      rpc::Future<int> slow;
      if (busy && world.rank() == 1) slow = rpc::async<&until_told>(0, first);
      if (world.rank() == 0) {
        if (busy) std::this_thread::sleep_for(20ms);
        EXPECT_THROW((rpc::sync<&until_told>(rpc::To(other, {.timeout = 100ms}), second)), TimeoutError);
        for (const int number : {first, second}) world.store().set(text("go", number), "");
      }
      if (busy && world.rank() == 1) {
        EXPECT_EQ(std::move(slow).get(), first);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, RpcSleep,
                         testing::Values(Setup{"shm", RanksAre::kThreads}, Setup{"shm", RanksAre::kProcesses},
                                         Setup{"hierarchical", RanksAre::kProcesses}),
                         setup_name);

// --- memory ---

// Kilobytes of this process: what it has touched, and its share of what it shares.
int64_t memory_kb(const char* what) {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  int64_t kb = 0;
  while (file >> word)
    if (word == what && file >> kb) return kb;
  throw std::runtime_error(std::string("no line ") + what);
}

int64_t pss_before = 0;
int64_t pss_grown() { return memory_kb("Pss:") - pss_before; }

// All call all; then each is asked how much memory that took: inboxes, heaps and threads, besides what libtorch has
// touched for its first tensor. At most 8 MB a worker.
TEST_P(RpcLoad, SixtyFourWorkersCallEachOther) {
  const int workers = kSanitized ? 16 : 64;
  run(workers, [&](World& world) {
    EXPECT_EQ(at::ones({3}).sum().item<float>(), 3);
    barrier();
    if (!as_threads()) pss_before = memory_kb("Pss:");
    barrier();
    rpc::init();
    std::vector<rpc::Future<int>> sums;
    for (int round = 0; round < 3; ++round)
      for (int to = 0; to < workers; ++to) sums.push_back(rpc::async<&plus>(to, world.rank(), to));
    for (size_t i = 0; i < sums.size(); ++i)
      EXPECT_EQ(std::move(sums[i]).get(), world.rank() + static_cast<int>(i) % workers);
    barrier();
    if (!as_threads() && world.rank() == 0) {
      int64_t all = 0;
      for (int to = 0; to < workers; ++to) all += rpc::sync<&pss_grown>(to);
      // Pages of an inbox that nobody has mapped yet are taken all the same.
      const size_t inbox = transport::shm_rings::inbox_bytes(workers, transport::shm_rings::capacity_for(workers));
      all += workers * static_cast<int64_t>(inbox >> 10);
      EXPECT_LE(all / workers, 8 << 10) << "KiB a worker";
      std::cout << workers << " workers: " << all / workers << " KiB each\n";
    }
    barrier();
    rpc::shutdown();
  });
}

// --- a storm ---

// Calls itself on the next worker, `depth` times, with the same arguments.
int64_t storm(int depth, const Tensor& tensor, const std::string& bytes) {
  const int next = (rpc::worker_info().id + 1) % static_cast<int>(rpc::all_workers().size());
  const auto size = static_cast<int64_t>(bytes.size()) + tensor.numel();
  return depth == 0 ? size : size + rpc::sync<&storm>(next, depth - 1, tensor, bytes);
}

// Random sizes, nested three deep, from eight threads. MUSTER_RPC_CALLS says how many, the nested ones included; with
// many of them what the processes have touched must not grow from the first fifth on.
TEST_P(RpcLoad, AStormOfNestedCalls) {
  constexpr int kWorkers = 2, kThreads = 4, kDepth = 3;
  const char* const wanted = std::getenv("MUSTER_RPC_CALLS");
  const int64_t calls = wanted ? std::atoll(wanted) : kSanitized ? 4'000 : 24'000;
  const bool measure = calls >= 500'000;
  const int64_t each = calls / (int64_t{kWorkers} * kThreads * kDepth);
  serve(kWorkers, [&](World& world) {
    std::atomic<int64_t> wrong{0}, begun{0};
    std::atomic<int64_t> early{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        const World::Scope scope(world);
        std::mt19937_64 dice(static_cast<uint64_t>(world.rank() * kThreads + t));
        const Tensor tensor = at::ones({1 << 18});
        const std::string bytes(64 << 10, 'x');
        // Mostly small; some through the heap, some longer than the ring.
        const auto size = [&](size_t most) { return (dice() % most) >> (dice() % 20); };
        for (int64_t i = 0; i < each; ++i) {
          const auto n = static_cast<int64_t>(size(1 << 18)), m = static_cast<int64_t>(size(64 << 10));
          const int64_t got = rpc::sync<&storm>(static_cast<int>(dice() % kWorkers), kDepth - 1, tensor.slice(0, 0, n),
                                                bytes.substr(0, static_cast<size_t>(m)));
          wrong += got != kDepth * (n + m);
          if (begun.fetch_add(1) == kThreads * each / 5 && measure) early = memory_kb("Rss:");
        }
      });
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    barrier();  // the others' calls make some here
    const auto census = rpc::census();
    EXPECT_EQ(census.pending_calls, 0u);
    if (measure) {
      const int64_t late = memory_kb("Rss:");
      std::cout << text("rank ", world.rank(), ": ", early.load() >> 10, " MiB after a fifth, ", late >> 10,
                        " MiB at the end, ", census.threads, " threads\n");
      EXPECT_LE(late, early + (32 << 10)) << "KiB";  // the allocators' own unevenness; a leak of 100 B a call is 80 MB
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, RpcLoad,
                         testing::Values(Setup{"shm", RanksAre::kThreads}, Setup{"shm", RanksAre::kProcesses},
                                         Setup{"hierarchical", RanksAre::kThreads}),
                         setup_name);

}  // namespace
}  // namespace muster::test
