// Ranks that come late or leave, and what the others are told of them.
#include <ATen/ops/ones.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <optional>
#include <thread>

#include "comm/core/backend.h"
#include "contract/comm_errors_fixture.h"
#include "muster/comm/collectives.h"
#include "support/asleep.h"
#include "support/forwarding_store.h"

namespace muster::test::comm_failures {
namespace {

using std::chrono::milliseconds;

// --- ranks that come late ---

TEST_P(Errors, TimeoutNamesWhoIsMissing) {
  const std::vector<std::pair<const char*, std::function<void(milliseconds)>>> calls = {
      {"all_reduce of 10 x Float", [](milliseconds t) { all_reduce(at::ones({10}), {.timeout = t}); }},
      {"all_reduce of 900000 x Float", [](milliseconds t) { all_reduce(at::ones({900'000}), {.timeout = t}); }},
      {"all_reduce of 2 x Float", [](milliseconds t) { all_reduce_async(at::ones({2}), {.timeout = t}).wait(); }},
      {"barrier", [](milliseconds t) { barrier({.timeout = t}); }},
      {"broadcast", [](milliseconds t) { broadcast(at::ones({50'000}), 0, {.timeout = t}); }},
  };
  for (const auto& [said, call] : calls)
    run(4, [&](World& world) {
      SCOPED_TRACE(said);
      broadcast(at::ones({3}), 2);
      if (world.rank() % 2 == 0) {
        // Rank 2 waits already when the timeout of rank 0 begins. Its own timeout is long, but it is told of rank 0's.
        std::optional<OnceAsleep> watch;
        if (world.rank() == 2)
          watch.emplace([&] { say(world, "2 waits"); });
        else
          hear(world, "2 waits");
        try {
          call(milliseconds(world.rank() == 0 ? 300 : 0));
          ADD_FAILURE() << "no timeout";
        } catch (const TimeoutError& timeout) {
          // On several hosts, a rank sees only missing ranks that its host or its leader waits for.
          const bool sees_all = GetParam().backend != "hierarchical";
          EXPECT_EQ(timeout.missing(), sees_all ? (std::vector<int>{1, 3}) : (std::vector<int>{1}));
          const std::string text = timeout.what();
          EXPECT_CONTAINS(text, said);
          EXPECT_CONTAINS(text, "#1");
          EXPECT_CONTAINS(text, "rank 1");
          if (sees_all) {
            EXPECT_CONTAINS(text, "rank 3");
          }
          EXPECT_CONTAINS(text, "its last: broadcast #0");
        }
        say(world, text("timed out on ", world.rank()));
        EXPECT_THROW(barrier(), TimeoutError);
      } else {
        hear(world, "timed out on 0");
        hear(world, "timed out on 2");
        EXPECT_THROW(call(milliseconds(0)), TimeoutError);
      }
    });
}

// A rank's store that delays the rank's notes about how far it is until `heard`.
class LateToSay final : public ForwardingStore {
 public:
  LateToSay(std::shared_ptr<Store> store, std::shared_future<void> heard)
      : ForwardingStore(std::move(store)), heard_(std::move(heard)) {}
  void set(std::string_view key, std::string_view value) override {
    hold_up(key);
    ForwardingStore::set(key, value);
  }
  Exchanged compare_set(std::string_view key, const std::optional<std::string>& expected,
                        std::string_view desired) override {
    hold_up(key);
    return ForwardingStore::compare_set(key, expected, desired);
  }

 private:
  void hold_up(std::string_view key) const {
    if (key.find("/broke/") != key.npos) heard_.wait();
  }
  const std::shared_future<void> heard_;
};

// A rank had come to the operation, but is too busy to report anything after the failure. The announcement that it sent
// shows that it had come.
TEST(WireErrors, WhoHasComeIsNotMissingThoughItSaysNothingMore) {
  const auto store = make_memory_store();
  std::promise<void> named;
  const auto late = std::make_shared<LateToSay>(store, named.get_future().share());
  WorldOptions options{.backend = "gloo", .timeout = kPatience};
  std::vector<std::future<void>> ranks;
  for (int rank = 0; rank < 4; ++rank)
    ranks.push_back(std::async(std::launch::async, [&, rank] {
      World world({.rank = rank, .world_size = 4, .local_rank = rank, .local_world_size = 4},
                  rank == 0 ? std::shared_ptr<Store>(late) : store, options);
      const auto sum = [&](milliseconds timeout) {
        all_reduce(at::ones({10}), {.group = world.group(), .timeout = timeout});
      };
      sum(kPatience);
      if (rank == 0) return (void)message_of<TimeoutError>([&] { sum(kPatience); });  // rank 2's deadline passes
      if (rank == 2) {
        try {
          sum(milliseconds(1000));
          ADD_FAILURE() << "no timeout";
        } catch (const TimeoutError& timeout) {
          EXPECT_EQ(timeout.missing(), (std::vector<int>{1, 3})) << timeout.what();
        }
        named.set_value();
        return store->set("named", "1");
      }
      store->get("named", patience());  // these ranks run, but do not come
    }));
  for (auto& rank : ranks) rank.get();
}

// A blocking operation behind one that may wait for hours ends by its own timeout.
TEST_P(Errors, ABlockingOperationBehindAnotherOneTimesOut) {
  run(2, [](World& world) {
    broadcast(at::ones({3}), 0);
    if (world.rank() == 0) {
      auto work = all_reduce_async(at::ones({10}), {.timeout = std::chrono::hours(1)});
      EXPECT_THROW(barrier({.timeout = milliseconds(50)}), TimeoutError);
      EXPECT_THROW(work.wait(), TimeoutError);
      say(world, "timed out");
    } else {
      hear(world, "timed out");
      // Rank 0 has entered the first of these. Over messages its part may be here already, before the note of its
      // failure.
      const auto both = [] {
        all_reduce(at::ones({10}));
        all_reduce(at::ones({10}));
      };
      EXPECT_THROW(both(), TimeoutError);
    }
  });
}

TEST_P(Errors, TheWorldsTimeoutIsTheDefault) {
  WorldOptions options;
  options.timeout = 2 * kPatience;
  run(
      2,
      [&](World& world) {
        comm::Backend& backend = comm::backend_of(world.group());
        EXPECT_EQ(backend.timeout(), options.timeout);
        backend.setTimeout(milliseconds(300));
        if (world.rank() == 1) return hear(world, "timed out");
        EXPECT_THROW(barrier(), TimeoutError);
        say(world, "timed out");
      },
      options);
}

// --- ranks that leave ---

TEST_P(Errors, ARankThatLeavesIsNamedImmediately) {
  const std::vector<std::function<void()>> calls = {[] { all_reduce(at::ones({10})); },
                                                    [] { all_reduce(at::ones({900'000})); },
                                                    [] { all_reduce_async(at::ones({1})).wait(); },
                                                    [] { barrier(); },
                                                    [] { recv(at::ones({1}), 1); },
                                                    [] { irecv(at::ones({1}), 1).wait(); },
                                                    [] { send(at::ones({100'000}), 1); }};
  for (size_t i = 0; i < calls.size(); ++i)
    run(3, [&](World& outer) {
      SCOPED_TRACE(i);
      {
        World world = world_beside(outer);
        const World::Scope scope(world);
        barrier();
        if (world.rank() == 1) {
          hear(outer, "0 waits");
          hear(outer, "2 waits");
        } else {
          const OnceAsleep watch([&] { say(outer, text(world.rank(), " waits")); });
          try {
            calls[i]();
            ADD_FAILURE() << "nothing was thrown";
          } catch (const PeerLost& lost) {
            EXPECT_EQ(lost.rank(), 1);
            EXPECT_CONTAINS(lost.what(), "rank 1 left");
          }
          EXPECT_THROW(barrier(), PeerLost);
        }
      }
      barrier();  // the other World is not affected
    });
}

TEST_P(Errors, ClosingAbortsWhatIsUnderWay) {
  run(2, [this](World& outer) {
    if (outer.rank() == 1) {
      World world = world_beside(outer);
      hear(outer, "closed");
      return;
    }
    std::vector<Work> works;
    {
      World world = world_beside(outer);
      const World::Scope scope(world);
      for (const int64_t count : {1, 900'000}) works.push_back(all_reduce_async(at::ones({count})));
      works.push_back(irecv(at::ones({1}), 1));
      works.push_back(isend(at::ones({900'000}), 1));
    }
    for (auto& work : works) {
      EXPECT_TRUE(work.is_completed());
      EXPECT_THROW(work.wait(), Aborted);
      EXPECT_THROW(work.wait(), Aborted);
    }
    say(outer, "closed");
  });
}

// Whoever needs the rank later learns that it has left, and the others go on exchanging messages.
TEST_P(Errors, ClosingWhileAnOperationIsUnderWayIsADeparture) {
  run(3, [this](World& outer) {
    World world = world_beside(outer);
    const World::Scope scope(world);
    if (outer.rank() == 0) {
      const at::Tensor parts = at::ones({6});
      const auto unequal = [&] {
        return std::vector<at::Tensor>{parts.narrow(0, 0, 1), parts.narrow(0, 1, 2), parts.narrow(0, 3, 3)};
      };
      Work pending = irecv(at::ones({1}), 1), gathering = all_gather_async(unequal(), at::ones({1}));
      { const World gone = std::move(world); }
      for (Work* const work : {&pending, &gathering}) EXPECT_THROW(work->wait(), Aborted);
      say(outer, "closed");
      return;
    }
    hear(outer, "closed");
    const at::Tensor t = at::full({2}, 5, at::kFloat);
    if (outer.rank() == 1) {
      send(t, 2);
      hear(outer, "received");  // before the loss is found
    } else {
      recv(t, 1);
      say(outer, "received");
    }
    EXPECT_TRUE(t.eq(5).all().item<bool>());
    try {
      all_reduce(t);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const PeerLost& lost) {
      EXPECT_EQ(lost.rank(), 0) << lost.what();
      EXPECT_CONTAINS(lost.what(), "left");
    }
    say(outer, text("found by ", outer.rank()));
    hear(outer, text("found by ", 3 - outer.rank()));  // before this one leaves, too
  });
}

TEST_P(Errors, ClosingAbortsThoseWhoWaitInOtherThreads) {
  run(2, [this](World& outer) {
    if (outer.rank() == 1) {
      World world = world_beside(outer);
      hear(outer, "closed");
      return;
    }
    std::vector<std::thread> threads;
    {
      World world = world_beside(outer);
      for (const bool receives : {false, true}) {
        std::promise<pid_t> entered;
        threads.emplace_back([&world, &entered, receives] {
          const World::Scope scope(world);
          entered.set_value(::gettid());
          if (receives) {
            EXPECT_THROW(recv(at::ones({1}), 1), Aborted);
          } else {
            EXPECT_THROW(all_reduce(at::ones({100})), Aborted);
          }
        });
        await_sleep(entered.get_future().get());
      }
    }
    for (auto& thread : threads) thread.join();
    say(outer, "closed");
  });
}

}  // namespace
}  // namespace muster::test::comm_failures
