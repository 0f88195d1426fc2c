// Remote calls: one suite, over shared memory and (between faked hosts) over TCP, between threads and processes. What
// goes wrong is in rpc_failure_test.cpp, and objects are in rpc_references_test.cpp.
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/verbose.h"
#include "contract/rpc_fixture.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/rpc/this_call.h"
#include "muster/rpc/traffic.h"
#include "support/served.h"
#include "support/ucx.h"

namespace muster::test::remote_calls {
namespace {

// --- the functions that are called ---

Tensor echo(Tensor x) { return x; }

std::string caller() { return rpc::this_call().caller().name; }
void fails_at_length() { throw std::runtime_error(std::string(1 << 20, 'x')); }

int begins(int number) {
  World::current().store().set("begun" + std::to_string(number), "");
  return held(number);
}
// Waits until `all` calls have begun. Returns how many have: fewer if they run one after another.
int meets(int all) {
  Store& store = World::current().store();
  store.add("begun", 1);
  for (const auto end = patience(); store.add("begun", 0) < all && !end.passed();) std::this_thread::sleep_for(1ms);
  held(0);
  return static_cast<int>(store.add("begun", 0));
}

rpc::Task<int> down_waiting(int depth) {
  const int next = (rpc::worker_info().id + 1) % static_cast<int>(rpc::all_workers().size());
  if (depth == 0) co_return 0;
  co_return 1 + co_await rpc::async<&down_waiting>(next, depth - 1);
}
// These block their thread on futures that have no Waits.
rpc::Task<int> add_at(int worker, int n) { co_return co_await rpc::async<&add>(worker, n, 1); }
int waits_for_a_task(int n) { return rpc::start(add_at(rpc::this_call().caller().id, n)).get(); }
int waits_for_both(int n) {
  const auto sum = rpc::async<&add>(rpc::this_call().caller().id, n, 0);
  const auto both = rpc::when_all(sum, rpc::make_ready_future(1)).get();
  return std::get<0>(both) + std::get<1>(both);
}
int waits_for_a_thread(int number) {
  World& world = World::current();
  rpc::Promise<int> promise;
  const std::jthread other([&] {
    const World::Scope scope(world);
    try {
      promise.try_set_value(held(number));
    } catch (...) {
      promise.try_set_error(std::current_exception());
    }
  });
  return promise.future().get();
}
// Returns true if the continuation of a call that it cancels runs before the handler ends. The call has no timeout,
// which would wake a thread that could run the continuation.
bool waits_for_what_it_cancels(int worker, int number) {
  const auto ran = std::make_shared<std::promise<void>>();
  const auto call = rpc::async<&begins>({worker, {.timeout = 0ms}}, number);
  call.then([ran](const Future<int>&) { ran->set_value(); });
  World::current().store().get("begun" + std::to_string(number), patience());
  call.cancel();
  return ran->get_future().wait_for(kPatience) == std::future_status::ready;
}

// --- calls ---

TEST_P(Rpc, CallsByNameAndRank) {
  run(3, [](World& world) {
    rpc::init({.name = world.rank() == 0 ? "trainer" : "ps" + std::to_string(world.rank())});
    EXPECT_EQ(rpc::all_workers().size(), 3u);
    EXPECT_EQ(rpc::worker_info("ps2").id, 2);
    for (int to = 0; to < 3; ++to) EXPECT_EQ(rpc::sync<&add>(to, 1, to), 1 + to);  // itself too
    EXPECT_EQ(rpc::sync<&caller>("ps1"), rpc::worker_info().name);
    rpc::sync<&nothing>("trainer");
    EXPECT_EQ(rpc::sync<[](std::string a, std::vector<int> b) { return a + std::to_string(b.size()); }>(
                  "ps1", "x", std::vector{1, 2}),
              "x2");
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { rpc::sync<&add>("nobody", 1, 2); }), "\"ps1\"");
    EXPECT_THROW(rpc::sync<&add>(3, 1, 2), InvalidArgument);
    rpc::shutdown();
    EXPECT_FALSE(rpc::is_running());
    EXPECT_THROW(rpc::sync<&add>(1, 1, 2), Aborted);
    rpc::init();  // again
    EXPECT_EQ(rpc::sync<&add>("worker1", 1, 2), 3);
    rpc::shutdown();
  });
}

TEST_P(Rpc, SaysWhichWayCallsGo) {
  if (!as_threads()) return;  // processes have another standard error
  ::setenv(kVerboseVariable, "1", 1);
  testing::internal::CaptureStderr();
  serve(2, [](World&) {});
  const std::string said = testing::internal::GetCapturedStderr();
  ::unsetenv(kVerboseVariable);
  EXPECT_CONTAINS(said, GetParam().backend == "shm" ? R"(rpc: "worker1" calls "worker0", "worker1" over shm)"
                                                    : R"(rpc: "worker1" calls "worker1" over shm; "worker0" over tcp)");
}

TEST_P(Rpc, WorkersAreKnownAfterTheEnd) {
  run(2, [](World& world) {
    rpc::init();
    const rpc::WorkerInfo& me = rpc::worker_info();
    const auto& all = rpc::all_workers();
    rpc::shutdown();
    EXPECT_EQ(me.id, world.rank());
    EXPECT_EQ(all.at(1).name, "worker1");
  });
}

// The cut error fits what the delivering thread may send without waiting.
TEST_P(Rpc, ALongErrorIsCut) {
  serve(2, [](World& world) {
    const auto text = message_of<RemoteError>([&] { rpc::sync<&fails_at_length>(1 - world.rank()); });
    EXPECT_CONTAINS(text, "xxx…");
    EXPECT_LT(text.size(), size_t{20} << 10);
  });
}

TEST_P(Rpc, TwoWorkersOfOneName) {
  run(2, [](World&) {
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { rpc::init({.name = "a"}); }), "\"a\"");
    EXPECT_FALSE(rpc::is_running());
    rpc::shutdown();  // there is nothing to end
    rpc::init();
    EXPECT_EQ(rpc::sync<&add>(1, 2, 3), 5);
    rpc::shutdown();
  });
}

TEST_P(Rpc, TensorsOfAllSizes) {
  serve(2, [](World& world) {
    const int to = 1 - world.rank();
    for (const int64_t n : {0, 1, 100, 2047, 2048, 2049, 5000, 100'000, 3'000'000}) {
      const Tensor x = at::rand({n});
      const Tensor y = rpc::sync<&twice>(to, x);
      EXPECT_TRUE(at::equal(y, x * 2)) << n;
      EXPECT_TRUE(at::equal(rpc::sync<&echo>(to, x), x)) << n;
    }
    const Tensor whole = at::arange(24).reshape({2, 3, 4});
    EXPECT_TRUE(at::equal(rpc::sync<&echo>(to, whole.transpose(0, 2)), whole.transpose(0, 2)));
    EXPECT_TRUE(at::equal(rpc::sync<&echo>(to, whole.select(1, 1)), whole.select(1, 1)));
    EXPECT_FALSE(rpc::sync<&echo>(to, Tensor()).defined());
  });
}

TEST_P(Rpc, WhatTheCalleeDoesToAnArgumentIsNotSeenHere) {
  serve(2, [](World& world) {
    const Tensor x = at::ones({1 << 20}), on_heap = world.heap().zeros({1 << 20});
    for (const Tensor& mine : {x, on_heap}) {
      const Tensor before = mine.clone();
      rpc::sync<[](Tensor t) { t.fill_(7); }>(1 - world.rank(), mine);
      EXPECT_TRUE(at::equal(mine, before));
    }
  });
}

TEST_P(Rpc, MovedTensorsOfTheHeapChangeHandsAndComeHome) {
  serve(2, [](World& world) {
    for (int i = 0; i < 3; ++i) {
      Tensor x = world.heap().zeros({1 << 18});
      x.fill_(i);
      const void* const where = x.const_data_ptr();
      Tensor y = rpc::sync<&echo>(1 - world.rank(), std::move(x));
      EXPECT_TRUE(at::equal(y, at::ones({1 << 18}) * i));
      const bool near = rpc::worker_info(0).host == rpc::worker_info(1).host;
      if (near) {
        EXPECT_EQ(y.const_data_ptr(), where);
      }
    }
    world.store().set("done" + std::to_string(world.rank()), "");
    // Everything that was lent has come back.
    EXPECT_TRUE(soon([&] { return world.heap().used() == 0; })) << world.heap().used();
    muster::barrier();
  });
}

TEST_P(Rpc, TrafficIsWhatWasSentAndReceived) {
  serve(2, [](World& world) {
    constexpr uint64_t kTensors = 10 * (size_t{64} << 10), kRest = 11 * 512;
    const rpc::Traffic before = rpc::traffic();
    muster::barrier();
    if (world.rank() == 0) {
      const Tensor x = at::ones({1 << 14});
      for (int i = 0; i < 10; ++i) rpc::sync<&echo>(1, x);
      rpc::sync<&nothing>(1);
      const rpc::Traffic made = rpc::traffic() - before;
      EXPECT_EQ(made.calls, 11u);
      EXPECT_GE(made.bytes_sent, kTensors);
      EXPECT_LT(made.bytes_sent, kTensors + kRest);
      EXPECT_GE(made.bytes_received, kTensors);
      EXPECT_LT(made.bytes_received, kTensors + kRest);
      rpc::sync<&echo>(0, x);  // to itself
      EXPECT_EQ((rpc::traffic() - before).calls, 11u);
      EXPECT_LT((rpc::traffic() - before).bytes_sent, kTensors + kRest);
    }
    muster::barrier();
    if (world.rank() == 1) {
      EXPECT_EQ((rpc::traffic() - before).calls, 0u);
    }
    // When everything is counted, each worker has received as much as the other has sent.
    const int other = 1 - world.rank();
    const auto key = [](int rank) { return "traffic" + std::to_string(rank); };
    EXPECT_TRUE(soon([&] {
      world.store().set(key(world.rank()), std::to_string(rpc::traffic().bytes_sent));
      return world.store().get(key(other), patience()) == std::to_string(rpc::traffic().bytes_received);
    })) << rpc::traffic().bytes_received;
    world.store().set(key(world.rank()), std::to_string(rpc::traffic().bytes_sent));
    muster::barrier();
  });
}

TEST_P(Rpc, AsynchronousCallsFromManyThreads) {
  serve(2, [](World& world) {
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        const World::Scope scope(world);
        for (int round = 0; round < 20; ++round) {
          std::vector<Future<int>> results;
          for (int i = 0; i < 50; ++i) results.push_back(rpc::async<&add>(1 - world.rank(), t * 1000, i));
          for (int i = 0; i < 50; ++i) wrong += results[static_cast<size_t>(i)].get() != t * 1000 + i;
          const Tensor x = at::rand({1 + 997 * round});
          wrong += !at::equal(rpc::sync<&echo>(1 - world.rank(), x), x);
        }
      });
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(rpc::census().pending_calls, 0u);
  });
}

TEST_P(Rpc, NestedCallsDoNotDeadlock) {
  serve(2,
        [](World&) {
          EXPECT_EQ(rpc::sync<&down>(0, 30), 30);
          EXPECT_EQ(rpc::sync<&down_waiting>(0, 100), 100);
          std::vector<Future<int>> many;
          for (int i = 0; i < 8; ++i) many.push_back(rpc::async<&down>(1, 10));
          for (auto& result : many) EXPECT_EQ(result.get(), 10);
        },
        {.max_threads = 2});
}

// A handler that waits gives up its place among the running handlers, whatever it waits for.
TEST_P(Rpc, HandlersMayWaitForAnyFuture) {
  serve(2,
        [](World& world) {
          if (world.rank() != 0) return;
          std::vector<Future<int>> waiting;
          for (int i = 0; i < 4; ++i) {
            waiting.push_back(rpc::async<&waits_for_a_task>(1, i));
            waiting.push_back(rpc::async<&waits_for_both>(1, i));
          }
          for (int i = 0; i < 8; ++i) EXPECT_EQ(waiting[static_cast<size_t>(i)].get(), i / 2 + 1);
          const auto for_a_thread = rpc::async<&waits_for_a_thread>(1, 0);
          EXPECT_EQ(rpc::sync<&add>(1, 1, 1), 2);
          world.store().set("go0", "");
          EXPECT_EQ(for_a_thread.get(), 0);
        },
        {.max_threads = 1});
}

TEST_P(Rpc, WhatAHandlerMakesDueRunsWhileItWaits) {
  serve(2, [](World& world) {
    if (world.rank() != 0) return;
    for (int i = 0; i < 3; ++i) {
      std::this_thread::sleep_for(20ms);  // the other worker's threads should sleep by now; not relied on
      EXPECT_TRUE(rpc::sync<&waits_for_what_it_cancels>(1, 0, i));
      world.store().set("go" + std::to_string(i), "");
    }
  });
}

TEST_P(Rpc, SlowHandlersRunAtTheSameTime) {
  serve(2, [](World& world) {
    if (world.rank() != 0) return;
    std::vector<Future<int>> slow;
    for (int i = 0; i < 6; ++i) slow.push_back(rpc::async<&meets>(1, 6));
    EXPECT_EQ(rpc::sync<&add>(1, 1, 1), 2);  // this call is not held up by the slow ones
    world.store().set("go0", "");
    for (auto& result : slow) EXPECT_EQ(result.get(), 6);
  });
}

TEST_P(Rpc, MoreCallsThanMayBeUnderWay) {
  serve(2,
        [](World& world) {
          std::vector<Future<int>> results;
          for (int i = 0; i < 500; ++i) {
            results.push_back(rpc::async<&add>(1 - world.rank(), i, 1));
            EXPECT_LE(rpc::census().pending_calls, 8u);
          }
          for (int i = 0; i < 500; ++i) EXPECT_EQ(results[static_cast<size_t>(i)].get(), i + 1);
        },
        {.max_calls = 8});
}

// So a stuck worker has at most max_calls requests from another worker, however often that one tries.
TEST_P(Rpc, CallsGivenUpCountUntilTheyAreAnswered) {
  static constexpr int kMost = 8, kThreads = 2;
  serve(2,
        [](World& world) {
          if (world.rank() == 1) {
            world.store().get("tried", patience());
            EXPECT_LE(rpc::census().running_handlers, size_t{kMost});
            world.store().set("go0", "");
            return;
          }
          std::vector<Future<int>> stuck, late;
          for (int i = 0; i < kThreads; ++i) stuck.push_back(rpc::async<&held>(1, 0));
          const auto large = rpc::async<&echo>({1, {.timeout = 50ms}}, world.heap().zeros({1 << 18}));
          EXPECT_THROW(large.get(), TimeoutError);
          // Its argument did not have to wait.
          EXPECT_TRUE(soon([&] { return world.heap().used() == 0; })) << world.heap().used();
          int refused = 0;
          for (int i = 0; i < 3 * kMost; ++i) try {
              late.push_back(rpc::async<&add>({1, {.timeout = 10ms}}, i, 1));
            } catch (const TimeoutError&) {
              ++refused;
            }
          EXPECT_EQ(late.size(), size_t{kMost - kThreads - 1});
          EXPECT_EQ(refused, 3 * kMost - (kMost - kThreads - 1));
          for (const auto& call : late) EXPECT_THROW(call.get(), TimeoutError);
          world.store().set("tried", "");
          for (const auto& call : stuck) EXPECT_EQ(call.get(), 0);
          for (int i = 0; i < 2 * kMost; ++i) EXPECT_EQ(rpc::sync<&add>(1, i, 1), i + 1);
        },
        {.max_threads = kThreads, .max_calls = kMost});
}

TEST_P(Rpc, ArgumentsOfUnansweredCallsAreBounded) {
  static constexpr size_t kMost = size_t{1} << 20;
  serve(2,
        [](World& world) {
          if (world.rank() == 1) {
            world.store().get("tried", patience());
            world.store().set("go0", "");
            return;
          }
          const Tensor half = at::ones({kMost / 8});  // in bytes
          const auto stuck = rpc::async<&held>(1, 0);
          const auto large = rpc::async<&echo>(1, half);
          const auto what = message_of<TimeoutError>([&] { rpc::async<&echo>({1, {.timeout = 10ms}}, half + 1); });
          EXPECT_CONTAINS(what, "has not answered calls with ");
          const auto small = rpc::async<&add>(1, 1, 2);  // does not wait
          world.store().set("tried", "");
          EXPECT_EQ(stuck.get(), 0);
          EXPECT_TRUE(at::equal(large.get(), half));
          EXPECT_EQ(small.get(), 3);
          EXPECT_TRUE(at::equal(rpc::sync<&echo>(1, at::ones({kMost})), at::ones({kMost})));  // alone it may be larger
          std::vector<Future<Tensor>> all;
          for (int i = 0; i < 30; ++i) all.push_back(rpc::async<&echo>(1, half * i));
          for (int i = 0; i < 30; ++i) EXPECT_TRUE(at::equal(all[static_cast<size_t>(i)].get(), half * i));
        },
        {.max_threads = 1, .max_call_bytes = kMost});
}

// --- coroutines ---

rpc::Task<int> gather_all() {
  std::vector<Future<int>> calls;
  for (const auto& worker : rpc::all_workers()) calls.push_back(rpc::async<&add>(worker, worker.id, 1));
  const std::vector<int> all = co_await rpc::when_all(std::move(calls));
  co_return std::accumulate(all.begin(), all.end(), 0);
}
TEST_P(Rpc, HandlersMayBeCoroutines) {
  serve(3, [](World& world) {
    EXPECT_EQ(rpc::sync<&gather_all>((world.rank() + 1) % 3), 6);
    auto doubled = rpc::async<&add>(1, 1, 2).then([](Future<int> sum) { return 2 * sum.get(); });
    EXPECT_EQ(doubled.get(), 6);
  });
}

// --- transports ---

TEST_P(Rpc, OverUcxForWhoAsksForIt) {
  if (const std::string why = as_threads() ? transport::ucx::unavailable_reason() : why_no_ucx(); !why.empty())
    GTEST_SKIP() << why;
  // On one host UCX has to be forced. Between hosts it is used together with shared memory.
  const bool is_one_host = GetParam().backend == "shm";
  serve(3,
        [](World& world) {
          const int next = (world.rank() + 1) % 3;
          for (int i = 0; i < 100; ++i) EXPECT_EQ(rpc::sync<&add>(next, i, 1), i + 1);
          for (const int64_t size : {0, 1, 5'000, 100'000, 3'000'000}) {
            const Tensor x = at::rand({size});
            EXPECT_TRUE(at::equal(rpc::sync<&twice>(next, x), x * 2)) << size;
          }
          std::vector<Future<Tensor>> many;
          for (int i = 0; i < 50; ++i) many.push_back(rpc::async<&echo>(next, at::full({10'000}, i)));
          for (int i = 0; i < 50; ++i)
            EXPECT_TRUE(at::equal(many[static_cast<size_t>(i)].get(), at::full({10'000}, i)));
          EXPECT_EQ(rpc::sync<&down>(next, 6), 6);
          const auto counter = rpc::remote<Counter>(next, 10);
          EXPECT_EQ(rpc::sync<&bump_through>((next + 1) % 3, counter), 11);
          EXPECT_EQ(counter.sync<&Counter::get>(), 11);
          EXPECT_THROW(rpc::sync<&fails>(next, 1), RemoteError);
        },
        {.transport = is_one_host ? "ucx" : "shm,ucx"});
}

// What profilers see, in all threads.
std::mutex seen_mutex;
std::vector<std::string> seen;
std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& event) {
  const std::lock_guard lock(seen_mutex);
  seen.emplace_back(event.name());
  return nullptr;
}

TEST_P(Rpc, CallsWaitsAndHandlersAreEventsOfProfilers) {
  const auto saw = [](const std::string& words, bool function) {
    const std::lock_guard lock(seen_mutex);
    return std::any_of(seen.begin(), seen.end(), [&](const std::string& event) {
      return contains(event, words) && (!function || contains(event, "held"));
    });
  };
  run(2, [&](World& world) {
    const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(&see).scopes({at::RecordScope::USER_SCOPE}));
    rpc::init();
    if (world.rank() == 0) {
      // The answer comes when the wait has been seen: an earlier one would leave nothing to wait for.
      std::thread watcher([&] {
        EXPECT_TRUE(eventually([&] { return saw("muster:rpc wait", false); }));
        world.store().set("go1", "");
      });
      EXPECT_EQ(rpc::sync<&held>(1, 1), 1);
      watcher.join();
      EXPECT_TRUE(saw("muster:rpc call ", true) && saw(" -> worker1", true));
    }
    rpc::shutdown();
    if (world.rank() == 1) {
      EXPECT_TRUE(saw("muster:rpc handler ", true) && saw(" <- worker0", true));
    }
    at::removeCallback(handle);
  });
}

TEST_P(Rpc, WaysThatThereAreNot) {
  run(1, [](World&) {
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { rpc::init({.transport = "pigeon"}); }),
                    "transport: expected the name of a transport, got \"pigeon\"");
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { rpc::init({.transport = "tcp,ucx"}); }), "shm,ucx");
    EXPECT_FALSE(rpc::is_running());
    rpc::shutdown();
    rpc::shutdown(rpc::Shutdown::kAbrupt);
  });
}

TEST_P(Rpc, WorkersWithOtherWaysAreToldSo) {
  run(2, [](World& world) {
    const std::string said =
        message_of<Mismatch>([&] { rpc::init({.transport = world.rank() == 0 ? "tcp" : "shm,tcp"}); });
    EXPECT_CONTAINS(said, "uses the transports");
    EXPECT_CONTAINS(said, "shm,tcp");
    rpc::shutdown();
    EXPECT_FALSE(rpc::is_running());
  });
}

MUSTER_RPC_CONTRACT(Rpc, Rpc);

}  // namespace
}  // namespace muster::test::remote_calls
