// Remote calls that fail: exceptions, timeouts, cancelled calls, workers that leave, and the end of RPC.
#include <sys/resource.h>

#include "contract/rpc_fixture.h"
#include "muster/base/error.h"
#include "muster/rpc/this_call.h"

namespace muster::test::remote_calls {
namespace {

TEST_P(Rpc, WhatTheFunctionThrowsArrives) {
  serve(2, [](World&) {
    try {
      rpc::sync<&fails>(1, 5);
      ADD_FAILURE();
    } catch (const RemoteError& error) {
      EXPECT_EQ(error.worker(), "worker1");
      EXPECT_EQ(error.type(), "std::out_of_range");
      EXPECT_CONTAINS(error.what(), "no such key");
      EXPECT_CONTAINS(error.what(), "fails(int)");
    }
  });
}

TEST_P(Rpc, TimeoutsNameTheFunctionAndStopIt) {
  serve(2, [](World& world) {
    if (world.rank() != 0) return;
    const auto message = message_of<TimeoutError>([] { rpc::sync<&held>({"worker1", {.timeout = 50ms}}, 1); });
    EXPECT_CONTAINS(message, "worker1");
    EXPECT_CONTAINS(message, "held(int)");
    const Future<int> late = rpc::async<&held>({1, {.timeout = 50ms}}, 2);  // no thread waits for it
    EXPECT_TRUE(soon([&] { return late.done(); }));
    EXPECT_THROW(late.get(), TimeoutError);
    for (const int number : {1, 2}) world.store().set("go" + std::to_string(number), "");
    EXPECT_EQ(rpc::sync<&add>(1, 2, 2), 4);
  });
}

TEST_P(Rpc, ANegativeTimeoutIsOverAlready) {
  serve(2, [](World& world) {
    if (world.rank() != 0) return;
    EXPECT_CONTAINS(message_of<TimeoutError>([] { rpc::sync<&add>({1, {.timeout = -1ms}}, 1, 1); }), "before it began");
    EXPECT_THROW(rpc::async<&add>({1, {.timeout = -1ms}}, 1, 1), TimeoutError);
    EXPECT_THROW(rpc::remote<&add>({1, {.timeout = -1ms}}, 1, 1), TimeoutError);
    EXPECT_EQ(rpc::sync<&add>(1, 2, 2), 4);
  });
}

// An object may take any time to be made. But its owner must take the call.
TEST_P(Rpc, AnObjectsOwnerThatTakesNoCallIsATimeout) {
  serve(2,
        [](World& world) {
          if (world.rank() != 0) return;
          const auto stuck = rpc::async<&held>({1, {.timeout = 0ms}}, 0);
          EXPECT_CONTAINS(message_of<TimeoutError>([] { rpc::remote<&add>(1, 1, 1); }), "no more can be made");
          world.store().set("go0", "");
          EXPECT_EQ(stuck.get(), 0);
        },
        {.timeout = 200ms, .max_calls = 1});
}

TEST_P(Rpc, TensorsOfMoreDimensionsThanTravel) {
  serve(2, [](World& world) {
    if (world.rank() != 0) return;
    for (const int64_t dims : {65, 129, 300}) {
      const at::Tensor one = at::ones(std::vector<int64_t>(static_cast<size_t>(dims), 1));
      EXPECT_CONTAINS(message_of<InvalidArgument>([&] { rpc::sync<&echo>(1, one); }), "dimensions cannot be sent");
    }
    const at::Tensor most = at::ones(std::vector<int64_t>(64, 1));
    EXPECT_EQ(rpc::sync<&echo>(1, most).dim(), 64);
  });
}

TEST_P(Rpc, OptionsThatCannotBe) {
  run(1, [](World&) {
    for (const rpc::Options& options :
         {rpc::Options{.timeout = -1ms}, rpc::Options{.max_threads = 0}, rpc::Options{.max_calls = -1}})
      EXPECT_THROW(rpc::init(options), InvalidArgument);
    EXPECT_FALSE(rpc::is_running());
  });
}

TEST_P(Rpc, ACancelledCallIsToldToStop) {
  static constexpr auto until_cancelled = [](std::string key) {
    World::current().store().set(key + "begun", "");
    while (!rpc::this_call().cancelled()) std::this_thread::yield();
    World::current().store().set(key + "stopped", "");
    rpc::this_call().check();
  };
  serve(2, [](World& world) {
    if (world.rank() != 0) return;
    auto call = rpc::async<until_cancelled>(1, "c");
    world.store().get("cbegun", patience());
    EXPECT_TRUE(call.cancel());
    EXPECT_THROW(call.get(), Aborted);
    world.store().get("cstopped", patience());
  });
}

TEST_P(Rpc, AWorkerThatLeavesFailsTheCallsToIt) {
  run(3, [](World& world) {
    rpc::init();
    if (world.rank() == 2) {
      world.store().get("called", patience());
      rpc::shutdown(rpc::Shutdown::kAbrupt);
      return;
    }
    if (world.rank() == 0) {
      const auto never = rpc::async<[] {
        while (!rpc::this_call().cancelled()) std::this_thread::yield();
      }>(2);
      world.store().set("called", "");
      const auto message = message_of<PeerLost>([&] { never.get(); });
      EXPECT_CONTAINS(message, "worker2");
      EXPECT_FALSE(rpc::is_alive(2));
      EXPECT_THROW(rpc::sync<&add>(2, 1, 1), PeerLost);
      EXPECT_EQ(rpc::sync<&add>(1, 1, 1), 2);  // the others go on
    }
    try {
      rpc::shutdown();
      ADD_FAILURE() << "worker 2 never shut down gracefully";
    } catch (const PeerLost&) {
    }
  });
}

TEST_P(Rpc, ShutdownWaitsForOthersAndTheirCalls) {
  serve(3, [](World& world) {
    // Worker 0 shuts down immediately. The others still call it for a while, through chains of handlers.
    if (world.rank() == 0) return;
    for (int i = 0; i < 50; ++i) EXPECT_EQ(rpc::sync<&down>(0, 3), 3);
  });
}

// A worker that only serves is in shutdown(): its thread there sleeps, however many handlers end.
TEST_P(Rpc, ShutdownSleepsWhileOthersCall) {
  run(2, [](World& world) {
    constexpr int kCalls = 2000;
    const auto sleeps = [] {
      rusage usage{};
      ::getrusage(RUSAGE_THREAD, &usage);
      return usage.ru_nvcsw;
    };
    rpc::init();
    if (world.rank() == 0)
      for (int i = 0; i < kCalls; ++i) rpc::sync<&nothing>(1);
    const auto before = sleeps();
    rpc::shutdown();
    if (world.rank() == 1) {
      EXPECT_LT(sleeps() - before, kCalls / 5);
    }
  });
}

TEST_P(Rpc, ShutdownEndsAtItsDeadline) {
  run(2, [](World& world) {
    rpc::init();
    if (world.rank() == 0) {
      EXPECT_CONTAINS(message_of<TimeoutError>([] { rpc::shutdown(rpc::Shutdown::kGraceful, 100ms); }), "1");
      world.store().set("over", "");
    } else {
      world.store().get("over", patience());
      rpc::shutdown(rpc::Shutdown::kAbrupt);
    }
  });
}

}  // namespace
}  // namespace muster::test::remote_calls
