// Failures, and what all ranks are told of them: ranks that disagree, come late or leave, and a caller's own mistakes.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <optional>
#include <thread>

#include "base/text.h"
#include "comm/core/backend.h"
#include "muster/comm/collectives.h"
#include "support/asleep.h"
#include "support/forwarding_store.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using std::chrono::milliseconds;

class Errors : public CommContract {
 protected:
  static void say(World& world, const std::string& key) { world.store().set(key, "1"); }
  static void hear(World& world, const std::string& key) { world.store().get(key, patience()); }

  // Whether all of `ranks` have the same text.
  static void expect_same(World& world, const std::string& key, const std::string& text, int ranks) {
    world.store().set(muster::text(key, world.rank()), text);
    for (int r = 0; r < ranks; ++r)
      EXPECT_EQ(world.store().get(muster::text(key, r), patience()), text) << "on rank " << r;
  }
};
MUSTER_COMM_CONTRACT(Errors);

// --- ranks that disagree ---

struct Disagreement {
  const char* name;
  std::function<void(World&)> call, other_call;  // ranks 0 and 2, and rank 1
  std::vector<const char*> said;
};

std::vector<Disagreement> disagreements() {
  const auto all_reduce_of = [](int64_t count, at::ScalarType dtype, ReduceOp op = ReduceOp::SUM) {
    return [=](World&) { all_reduce(at::ones({count}, dtype), {.op = op}); };
  };
  const auto outputs = [](int n, int64_t count) {
    return std::vector<at::Tensor>(static_cast<size_t>(n), at::ones({count}));
  };
  const auto uneven = [](const std::vector<int64_t>& counts) {
    std::vector<at::Tensor> list;
    for (const int64_t count : counts) list.push_back(at::ones({count}));
    return list;
  };
  const auto all_gather_of = [=](std::vector<int64_t> counts) {
    return [=](World& w) { all_gather(uneven(counts), at::ones({counts[static_cast<size_t>(w.rank())]})); };
  };
  const auto reduce_scatter_of = [=](std::vector<int64_t> counts, ReduceOp op = ReduceOp::SUM) {
    return [=](World& w) {
      reduce_scatter(at::ones({counts[static_cast<size_t>(w.rank())]}), uneven(counts), {.op = op});
    };
  };
  return {
      {"operation",
       all_reduce_of(10, at::kFloat),
       [](World&) { broadcast(at::ones({10})); },
       {"rank 0 called all_reduce of 10 x Float, SUM", "rank 1 called broadcast of 10 x Float, from rank 0"}},
      {"skipped one",
       [](World&) { barrier(), all_reduce(at::ones({10})); },
       all_reduce_of(10, at::kFloat),
       {"rank 0 called barrier", "rank 1 called all_reduce of 10 x Float"}},
      {"order",
       [](World&) { all_reduce(at::ones({10})), reduce(at::ones({10}), 2); },
       [](World&) { reduce(at::ones({10}), 2), all_reduce(at::ones({10})); },
       {"rank 0 called all_reduce of 10 x Float", "rank 1 called reduce of 10 x Float, SUM, to rank 2"}},
      {"all_reduce and barrier", all_reduce_of(10, at::kFloat), [](World&) { barrier(); }, {"rank 1 called barrier"}},
      {"two that move the same bytes",
       [=](World& w) { gather(at::ones({5}), outputs(w.rank() == 0 ? 3 : 0, 5)); },
       [=](World&) { all_gather(outputs(3, 5), at::ones({5})); },
       {"rank 0 called gather of 5 x Float", "rank 1 called all_gather of 5 x Float"}},
      {"split on one rank",
       [](World& w) { w.group().split(0); },
       [](World&) { barrier(); },
       {"rank 0 called all_gather of 2 x Long (comm_errors_test.cpp:", "rank 1 called barrier (comm_errors_test.cpp:"}},
      {"count", all_reduce_of(10, at::kFloat), all_reduce_of(11, at::kFloat), {"10 x Float", "11 x Float"}},
      {"count, one small and one large",
       all_reduce_of(10, at::kFloat),
       all_reduce_of(1'000'000, at::kFloat),
       {"10 x Float", "1000000 x Float"}},
      {"count, large",
       all_reduce_of(1'000'001, at::kFloat),
       all_reduce_of(1'000'000, at::kFloat),
       {"1000001 x Float", "1000000 x Float"}},
      {"nothing on one rank", all_reduce_of(10, at::kFloat), all_reduce_of(0, at::kFloat), {"10 x Float", "0 x Float"}},
      {"dtype", all_reduce_of(10, at::kFloat), all_reduce_of(10, at::kInt), {"10 x Float", "10 x Int"}},
      {"dtype of the same size",
       all_reduce_of(4000, at::kHalf),
       all_reduce_of(4000, at::kBFloat16),
       {"Half", "BFloat16"}},
      {"reduce operation", all_reduce_of(10, at::kFloat), all_reduce_of(10, at::kFloat, ReduceOp::MAX), {"SUM", "MAX"}},
      {"reduce operation of reduce",
       [](World&) { reduce(at::ones({10}), 0, {.op = ReduceOp::MIN}); },
       [](World&) { reduce(at::ones({10}), 0, {.op = ReduceOp::PRODUCT}); },
       {"MIN, to rank 0", "PRODUCT, to rank 0"}},
      {"reduce operation of reduce_scatter",
       reduce_scatter_of({5, 5, 5}),
       reduce_scatter_of({5, 5, 5}, ReduceOp::MAX),
       {"reduce_scatter of 5 x Float, SUM", "reduce_scatter of 5 x Float, MAX"}},
      {"sum with and without factors",
       all_reduce_of(10, at::kFloat),
       [](World&) { all_reduce(at::ones({10}), {.op = ReduceOp::PREMUL_SUM, .factor = 0.5}); },
       {"rank 0 called all_reduce of 10 x Float, SUM", "rank 1 called all_reduce of 10 x Float, PREMUL_SUM"}},
      {"root of broadcast",
       [](World&) { broadcast(at::ones({10}), 0); },
       [](World&) { broadcast(at::ones({10}), 1); },
       {"broadcast of 10 x Float, from rank 0", "from rank 1"}},
      {"root of reduce",
       [](World&) { reduce(at::ones({10}), 0); },
       [](World&) { reduce(at::ones({10}), 2); },
       {"to rank 0", "to rank 2"}},
      {"root of gather",
       [=](World& w) { gather(at::ones({5}), outputs(w.rank() == 0 ? 3 : 0, 5), 0); },
       [=](World&) { gather(at::ones({5}), outputs(3, 5), 1); },
       {"gather of 5 x Float, to rank 0", "gather of 5 x Float, to rank 1"}},
      {"root of scatter",
       [=](World& w) { scatter(at::ones({5}), outputs(w.rank() == 0 ? 3 : 0, 5), 0); },
       [=](World&) { scatter(at::ones({5}), outputs(3, 5), 1); },
       {"scatter of 5 x Float, from rank 0", "scatter of 5 x Float, from rank 1"}},
      {"count of broadcast",
       [](World&) { broadcast(at::ones({10})); },
       [](World&) { broadcast(at::ones({20})); },
       {"broadcast of 10 x Float", "broadcast of 20 x Float"}},
      {"count of reduce",
       [](World&) { reduce(at::ones({10'000})); },
       [](World&) { reduce(at::ones({20'000})); },
       {"reduce of 10000 x Float", "reduce of 20000 x Float"}},
      {"dtype of broadcast",
       [](World&) { broadcast(at::ones({10})); },
       [](World&) { broadcast(at::ones({10}, at::kInt)); },
       {"broadcast of 10 x Float", "broadcast of 10 x Int"}},
      {"dtype of all_gather",
       [=](World&) { all_gather(outputs(3, 5), at::ones({5})); },
       [](World&) { all_gather(std::vector<at::Tensor>(3, at::ones({5}, at::kInt)), at::ones({5}, at::kInt)); },
       {"all_gather of 5 x Float", "all_gather of 5 x Int"}},
      {"count in a list of all_gather",
       all_gather_of({5, 6, 7}),
       all_gather_of({5, 8, 7}),
       {"broadcast of 6 x Float, from rank 1, part of all_gather",
        "broadcast of 8 x Float, from rank 1, part of all_gather"}},
      {"equal and unequal lists of all_gather",
       all_gather_of({5, 6, 7}),
       all_gather_of({6, 6, 6}),
       {"broadcast of 5 x Float, from rank 0, part of all_gather", "all_gather of 6 x Float"}},
      {"count in a list of reduce_scatter",
       reduce_scatter_of({5, 6, 7}),
       reduce_scatter_of({5, 6, 8}),
       {"reduce of 7 x Float, SUM, to rank 2, part of reduce_scatter",
        "reduce of 8 x Float, SUM, to rank 2, part of reduce_scatter"}},
      {"count of all_gather",
       [=](World&) { all_gather(outputs(3, 5), at::ones({5})); },
       [=](World&) { all_gather(outputs(3, 6), at::ones({6})); },
       {"all_gather of 5 x Float", "all_gather of 6 x Float"}},
      {"count of reduce_scatter",
       [=](World&) { reduce_scatter(at::ones({5}), outputs(3, 5)); },
       [=](World&) { reduce_scatter(at::ones({6}), outputs(3, 6)); },
       {"reduce_scatter of 5 x Float", "reduce_scatter of 6 x Float"}},
      {"count of gather",
       [=](World& w) { gather(at::ones({5}), outputs(w.rank() == 0 ? 3 : 0, 5)); },
       [](World&) { gather(at::ones({6}), {}); },
       {"gather of 5 x Float", "gather of 6 x Float"}},
      {"count of scatter",
       [=](World& w) { scatter(at::ones({5}), outputs(w.rank() == 0 ? 3 : 0, 5)); },
       [](World&) { scatter(at::ones({6}), {}); },
       {"scatter of 5 x Float", "scatter of 6 x Float"}},
      {"parts of all_to_all",
       [](World&) { all_to_all_single(at::ones({6}), at::ones({6})); },
       [](World&) {
         all_to_all_single(at::ones({6}), at::ones({7}), {.output_splits = {2, 2, 2}, .input_splits = {3, 2, 2}});
       },
       {"rank 1 (comm_errors_test.cpp:", " sends 12 bytes to rank 0 (comm_errors_test.cpp:", "which expects 8"}},
      {"large parts of all_to_all",
       [](World&) { all_to_all_single(at::ones({600'000}), at::ones({600'000})); },
       [](World&) { all_to_all_single(at::ones({600'003}), at::ones({600'003})); },
       {"all_to_all", "800000", "800004"}},
      {"dtype of all_to_all",
       [](World&) { all_to_all_single(at::ones({6}), at::ones({6})); },
       [](World&) { all_to_all_single(at::ones({6}, at::kInt), at::ones({6}, at::kInt)); },
       {"Float", "Int"}},
  };
}

int times_in(const std::string& text, std::string_view part) {
  int times = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++times;
  return times;
}

TEST_P(Errors, MismatchNamesBothSidesOnEveryRank) {
  for (const auto& each : disagreements())
    for (const bool async : {false, true}) {
      if (async && std::string(each.name) != "operation") continue;
      run(3, [&](World& world) {
        SCOPED_TRACE(each.name);
        all_reduce(at::ones({3}));  // operation #0 is in order
        const auto& call = world.rank() == 1 ? each.other_call : each.call;
        const auto text = message_of<Mismatch>([&] {
          if (async)
            (world.rank() == 1 ? broadcast_async(at::ones({10})) : all_reduce_async(at::ones({10}))).wait();
          else
            call(world);
        });
        for (const char* part : each.said) EXPECT_CONTAINS(text, part);
        EXPECT_EQ(times_in(text, "(comm_errors_test.cpp:"), 2) << text;  // where both called
        expect_same(world, "mismatch", text, 3);
        // The group stays failed, and reports the same error.
        EXPECT_EQ(message_of<Mismatch>([] { barrier(); }), text);
        EXPECT_EQ(message_of<Mismatch>([] { barrier_async().wait(); }), text);
        EXPECT_EQ(message_of<Mismatch>([&] { send(at::ones({1}), 0); }), text);
        // Other groups are not affected.
        all_reduce(at::ones({3}), {.group = world.new_group({0, 1, 2})});
      });
    }
}

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

// --- the caller's mistakes ---

TEST_P(Errors, InvalidArgumentIsFoundBeforeAnythingIsSent) {
  run(2, [](World& world) {
    const int me = world.rank();
    const at::Tensor ok = at::ones({4}), undefined, meta = at::empty({4}, at::TensorOptions(at::kMeta)),
                     sparse = at::ones({4}).to_sparse(), flags = at::ones({4}, at::kBool),
                     complex = at::ones({4}, at::kComplexFloat), three = at::ones({3}), ints = at::ones({4}, at::kInt),
                     eight = at::ones({8}), expanded = at::ones({1}).expand({4}),
                     overlapping = at::empty_strided({4}, {0}), eight_ints = at::ones({8}, at::kInt),
                     scalar = at::ones({}), conjugate = at::ones({4}, at::kComplexFloat).conj();
    struct Mistake {
      const char* said;
      std::function<void()> call;
    };
    const std::vector<Mistake> mistakes = {
        {"undefined", [&] { all_reduce(undefined); }},
        {"undefined", [&] { broadcast(undefined); }},
        {"undefined",
         [&] {
           all_gather({ok, undefined}, ok);
         }},
        {"undefined",
         [&] {
           reduce_scatter(ok, {undefined, ok});
         }},
        {"undefined", [&] { all_to_all_single(undefined, ok); }},
        {"undefined", [&] { all_to_all_single(ok, undefined); }},
        {"undefined", [&] { send(undefined, 0); }},
        {"meta", [&] { all_reduce(meta); }},
        {"meta", [&] { all_gather_into_tensor(at::empty({8}, at::TensorOptions(at::kMeta)), ok); }},
        {"meta", [&] { recv(meta, 0); }},
        {"MAX is not defined for sparse tensors", [&] { all_reduce(sparse, {.op = ReduceOp::MAX}); }},
        {"sparse", [&] { broadcast(sparse); }},
        {"sparse", [&] { isend(sparse, 0); }},
        {"conjugate", [&] { broadcast(conjugate); }},
        {"AVG is not defined here for tensors of Bool", [&] { all_reduce(flags, {.op = ReduceOp::AVG}); }},
        {"BXOR is not defined here for tensors of Float", [&] { all_reduce(ok, {.op = ReduceOp::BXOR}); }},
        {"MAX is not defined here for tensors of ComplexFloat", [&] { reduce(complex, 0, {.op = ReduceOp::MAX}); }},
        {"not defined",
         [&] {
           reduce_scatter(flags, {flags, flags}, {.op = ReduceOp::AVG});
         }},
        {"not defined", [&] { all_reduce(ok, {.op = static_cast<ReduceOp>(9)}); }},
        {"root 2 is outside a group of 2", [&] { broadcast(ok, 2); }},
        {"root -1", [&] { reduce(ok, -1); }},
        {"root 2", [&] { gather(ok, {}, 2); }},
        {"root 7", [&] { scatter(ok, {}, 7); }},
        {"rank 2 is outside a group of 2", [&] { send(ok, 2); }},
        {"rank -1", [&] { isend(ok, kAnySource); }},
        {"rank -2", [&] { irecv(ok, -2); }},
        {"there are 3 outputs in a group of 2",
         [&] {
           all_gather({ok, ok, ok}, ok);
         }},
        {"0 outputs", [&] { all_gather({}, ok); }},
        {"3 x Float where 4 x Float",
         [&] {
           all_gather({three, three}, ok);
         }},
        {"4 x Int where 4 x Float",
         [&] {
           all_gather({ok, ints}, ok);
         }},
        {"4 x Float where 8 x Float", [&] { all_gather_into_tensor(ok, ok); }},
        {"8 x Int where 8 x Float", [&] { all_gather_into_tensor(eight_ints, ok); }},
        {"3 inputs",
         [&] {
           reduce_scatter(ok, {ok, ok, ok});
         }},
        {"3 x Float",
         [&] {
           reduce_scatter(ok, {three, three});
         }},
        {"4 x Float where 8", [&] { reduce_scatter_tensor(ok, ok); }},
        {me == 0 ? "0 outputs" : "which is not the root",
         [&] {
           gather(ok, me == 0 ? std::vector<at::Tensor>{} : std::vector{ok, ok});
         }},
        {me == 0 ? "3 x Float" : "which is not the root",
         [&] {
           gather(ok, {ok, three});
         }},
        {me == 0 ? "4 x Int" : "which is not the root",
         [&] {
           scatter(ok, {ok, ints});
         }},
        {"3 rows cannot be divided among 2", [&] { all_to_all_single(three, three); }},
        {"cannot be divided", [&] { all_to_all_single(scalar, scalar); }},
        {"different dtypes", [&] { all_to_all_single(ok, ints); }},
        {"1 input splits for 2", [&] { all_to_all_single(ok, ok, {.input_splits = {4}}); }},
        {"do not add up to its 4 rows",
         [&] {
           all_to_all_single(ok, ok, {.output_splits = {1, 2}});
         }},
        {"negative",
         [&] {
           all_to_all_single(ok, ok, {.output_splits = {5, -1}});
         }},
        {"add up",
         [&] {
           all_to_all_single(ok, ok, {.input_splits = {INT64_MAX, INT64_MAX}});
         }},
        {"one dimension",
         [&] {
           all_to_all_single(scalar, scalar, {.input_splits = {1, 0}});
         }},
        // Several elements in one place cannot hold several results.
        {"overlap", [&] { all_reduce(expanded); }},
        {"overlap", [&] { broadcast(overlapping); }},
        {"overlap",
         [&] {
           all_gather({expanded, ok}, ok);
         }},
        {"overlap", [&] { recv(expanded, 0); }},
        {"overlap", [&] { all_to_all_single(expanded, ok); }},
    };
    for (size_t i = 0; i < mistakes.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "mistake " << i << ": " << mistakes[i].said);
      EXPECT_CONTAINS(message_of<InvalidArgument>(mistakes[i].call), mistakes[i].said);
    }
    // Nothing was sent: the group still works, and counts from the start.
    all_reduce(ok);
    EXPECT_TRUE((ok == 2).all().item<bool>());
    EXPECT_EQ(world.group().stats().operations, 1u);
    // An expanded input is not a mistake.
    const at::Tensor both = at::zeros({8});
    all_gather_into_tensor(both, expanded);
    EXPECT_TRUE((both == 1).all().item<bool>());
  });
}

// The other ranks are told the text of the exception that ended a rank.
TEST_P(Errors, AnExceptionInOneRankReachesTheOthersWithItsText) {
  if (!as_threads()) GTEST_SKIP() << "for processes, the launcher tells; see launch_function_test.cpp";
  std::vector<std::string> heard(3);
  try {
    run(3, [&](World& world) {
      if (world.rank() == 1) throw std::runtime_error("the data ran out");
      heard[static_cast<size_t>(world.rank())] = message_of<PeerLost>([] { barrier(); });
      throw Aborted("an echo");
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "the data ran out");
  }
  for (const int rank : {0, 2}) EXPECT_CONTAINS(heard[static_cast<size_t>(rank)], "rank 1 ended: the data ran out");
}

}  // namespace
}  // namespace muster::test
