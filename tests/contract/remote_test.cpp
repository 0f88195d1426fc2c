// Map and reduce over workers: one suite, over shared memory and (between faked hosts) over TCP, between threads and
// processes.
#include "muster/remote/auto_init_rpc.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/remote/on_rank.h"
#include "muster/remote/parallelize.h"
#include "muster/rpc/this_call.h"
#include "support/nothing_left.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using namespace std::chrono_literals;
using at::Tensor;

class Remote : public CommContract {
 protected:
  // Runs the body in each of n workers, within auto_init_rpc.
  void serve(int n, const std::function<void(World&)>& body) const {
    run(n, [&](World& world) { auto_init_rpc([&] { body(world); }); });
  }
  // Runs the body in worker 0 while the others serve.
  void lead(int n, const std::function<void(World&)>& body) const {
    serve(n, [&](World& world) {
      if (world.rank() == 0) body(world);
    });
  }
};

// --- the functions that are called ---

using Part = std::pair<int, Tensor>;
Part who_and_what(const Tensor& x) { return {get_rank(), x}; }
Tensor doubled(const Tensor& x) { return x * 2; }
Tensor mean_of(Tensor x) { return x.mean(); }
int rank_of(Tensor) { return get_rank(); }
int own_rank(int) { return get_rank(); }
rpc::Task<int64_t> size_of(Tensor x) { co_return x.numel(); }
void note(std::string key, Tensor x) { World::current().store().add(key, x.numel()); }
std::pair<bool, bool> asks(Tensor x, Whole<Tensor> whole) { return {x.requires_grad(), whole->requires_grad()}; }
double weighted(const std::map<std::string, Tensor>& batch, std::string_view which, std::span<const double> weights) {
  return batch.at(std::string(which)).sum().item<double>() * weights[0];
}

std::string text_of(int64_t part) { return std::to_string(part); }
// Reports that it has begun, and runs until it is cancelled.
void until_cancelled(const std::string& key, int64_t part) {
  World::current().store().set(key + "begun" + text_of(part), "");
  while (!rpc::this_call().cancelled()) std::this_thread::yield();
  World::current().store().set(key + "stopped" + text_of(part), "");
  rpc::this_call().check();
}
// Part 2 fails when all parts have begun. The others run until they are cancelled.
int fails_in_part_2(std::string key, Tensor x) {
  const auto part = x.item<int64_t>();
  if (part != 2) until_cancelled(key, part);
  for (const int other : {0, 1}) World::current().store().get(key + "begun" + text_of(other), patience());
  throw std::out_of_range("no such row");
}
int never_ends(std::string key, Tensor x) {
  until_cancelled(key, x[0].item<int64_t>());
  return 0;
}

void wait_for(World& world, const std::string& key) { world.store().get(key, patience()); }

// --- where ---

TEST_P(Remote, EachWorkerKnowsItsPlace) {
  run(3, [](World& world) {
    int order = 0;
    const auto result = auto_init_rpc(
        [&] {
          EXPECT_EQ(++order, 2);
          EXPECT_EQ(world.store().add("ready", 0), 3);  // main functions run after all workers' worker_init
          const WorldInfo info = get_world_info();
          EXPECT_EQ(info.rank(), world.rank());
          EXPECT_EQ(info.world_size, 3);
          EXPECT_EQ(info.local_rank, world.local_rank());
          EXPECT_EQ(info.local_world_size, world.local_world_size());
          EXPECT_EQ(info.worker_name, "w" + std::to_string(world.rank()));
          EXPECT_EQ(get_worker_name(), info.worker_name);
          EXPECT_EQ(is_world_leader(), world.rank() == 0);
          EXPECT_EQ(get_worker_id(), world.rank());
          EXPECT_EQ(get_worker_id("w2"), 2);
          EXPECT_EQ(get_worker_id(1), 1);
          EXPECT_THROW(get_worker_id("nobody"), InvalidArgument);
          EXPECT_EQ(rpc::sync<&own_rank>("w1", 0), 1);  // handlers know where they run
          return world.rank() + 40;
        },
        {.worker_init =
             [&] {
               EXPECT_EQ(++order, 1);
               EXPECT_TRUE(rpc::is_running());
               world.store().add("ready", 1);
             },
         .worker_name = [](const WorldInfo& info) { return "w" + std::to_string(info.world_rank); }});
    EXPECT_EQ(result, world.rank() + 40);
    EXPECT_FALSE(rpc::is_running());
    auto_init_rpc([] { EXPECT_EQ(get_worker_name(), "worker" + std::to_string(get_rank())); });  // again
  });
}

TEST_P(Remote, AnExceptionFromMainEndsRpcAtOnce) {
  run(2, [](World& world) {
    if (world.rank() == 1) {
      EXPECT_THROW(auto_init_rpc([&] {
                     wait_for(world, "called");
                     throw std::domain_error("mine");
                   }),
                   std::domain_error);
      EXPECT_FALSE(rpc::is_running());
      return;
    }
    EXPECT_THROW(auto_init_rpc([&] {
                   auto call = rpc::async<&never_ends>(1, "x", at::zeros({1}, at::kLong));
                   wait_for(world, "xbegun0");
                   world.store().set("called", "");
                   call.get();
                 }),
                 PeerLost);
  });
}

TEST_P(Remote, AWorkerInitThatFailsFailsAll) {
  run(2, [](World& world) {
    const auto start = [&] {
      auto_init_rpc([] { ADD_FAILURE() << "main runs"; }, {.worker_init = [&] {
                      if (world.rank() == 1) throw std::domain_error("no such device");
                    }});
    };
    if (world.rank() == 1) {
      EXPECT_THROW(start(), std::domain_error);
      EXPECT_FALSE(rpc::is_running());
      world.abort("worker 1 gives up");
    } else {
      EXPECT_THROW(start(), Error);
      EXPECT_FALSE(rpc::is_running());
    }
  });
}

// --- parts ---

TEST_P(Remote, RowsGoToTheWorkersInTurn) {
  for (const int n : {1, 3})
    lead(n, [n](World&) {
      for (const int64_t size : {1, 2, 3, 4, 7, 9}) {
        const Tensor x = at::rand({size, 2});
        const std::vector<Part> parts = remote_sync_call<&who_and_what>(x);
        ASSERT_EQ(parts.size(), static_cast<size_t>(std::min<int64_t>(n, size)));
        std::vector<Tensor> rows;
        for (size_t i = 0; i < parts.size(); ++i) {
          EXPECT_EQ(parts[i].first, static_cast<int>(i));
          rows.push_back(parts[i].second);
        }
        EXPECT_TRUE(at::equal(at::cat(rows), x)) << size;
        const auto single = remote_sync_call<&who_and_what>(
            x, {.partitioner = dim_partitioner(0, {.exclusive = true, .keepdim = false})});
        ASSERT_EQ(single.size(), static_cast<size_t>(size));
        for (size_t i = 0; i < single.size(); ++i) {
          EXPECT_EQ(single[i].first, static_cast<int>(i) % n);
          EXPECT_TRUE(at::equal(single[i].second, x[static_cast<int64_t>(i)]));
        }
      }
      EXPECT_EQ(remote_sync_call<&who_and_what>(at::rand({0, 2})).size(), 0u);
      EXPECT_CONTAINS(
          message_of<InvalidArgument>([] { remote_sync_call<&doubled>(at::rand({0}), {.reducer = mean_reducer}); }),
          "no results");
      EXPECT_EQ(remote_async_call<&who_and_what>(at::rand({0, 2})).get().size(), 0u);
    });
}

TEST_P(Remote, AllOfItToSome) {
  serve(3, [](World& world) {
    const Tensor x = at::arange(5);
    EXPECT_EQ(remote_sync_call<&rank_of>(x, {.partitioner = 2}), std::vector{2});
    EXPECT_EQ(remote_sync_call<&rank_of>(x, {.partitioner = "worker1"}), std::vector{1});
    EXPECT_EQ(remote_sync_call<&rank_of>(x, {.partitioner = rpc::worker_info(0)}), std::vector{0});
    const auto all = remote_sync_call<&who_and_what>(x, {.partitioner = every_worker});
    ASSERT_EQ(all.size(), 3u);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(all[static_cast<size_t>(i)].first, i);
      EXPECT_TRUE(at::equal(all[static_cast<size_t>(i)].second, x));
    }
    EXPECT_EQ(remote_sync_call<&own_rank>(5), std::vector{world.rank()});  // nothing to split: this worker
    const auto some = dim_partitioner(0, {.workers = {"worker2", 0}});
    EXPECT_EQ(remote_sync_call<&rank_of>(x, {.partitioner = some}), (std::vector{2, 0}));
    // A user-defined partitioner: the first row stays here, the rest goes to worker 1.
    const auto first_and_rest = [](const Tensor& whole) {
      return std::vector<RemotePart<Tensor>>{{get_rank(), {whole.slice(0, 0, 1)}}, {"worker1", {whole.slice(0, 1)}}};
    };
    const auto parts = remote_sync_call<&who_and_what>(x, {.partitioner = first_and_rest});
    ASSERT_EQ(parts.size(), 2u);
    EXPECT_EQ(parts[0].first, world.rank());
    EXPECT_EQ(parts[1].first, 1);
    EXPECT_EQ(parts[1].second.size(0), 4);
  });
}

// Worker 2 answers when the others have done all parts that it does not have.
std::pair<int, int64_t> slow_on_worker_2(std::string key, int64_t others, Tensor x) {
  Store& store = World::current().store();
  if (get_rank() == 2) {
    const auto until = patience();
    while (store.add(key, 0) < others && !until.passed()) std::this_thread::yield();
    EXPECT_FALSE(until.passed());
  } else {
    store.add(key, 1);
  }
  return {get_rank(), x.item<int64_t>()};
}

TEST_P(Remote, ABalancedCallGivesASlowWorkerFewParts) {
  lead(3, [](World&) {
    constexpr int64_t kParts = 40, kOfTheSlow = 2;
    const auto balanced = [](std::vector<WorkerId> workers) {
      return dim_partitioner(0, {.exclusive = true, .keepdim = false, .workers = std::move(workers), .balanced = true});
    };
    const auto done = remote_sync_call<&slow_on_worker_2>("slow", kParts - kOfTheSlow, at::arange(kParts),
                                                          {.partitioner = balanced({})});
    ASSERT_EQ(done.size(), static_cast<size_t>(kParts));
    std::map<int, int64_t> of;
    for (int64_t i = 0; i < kParts; ++i) {
      EXPECT_EQ(done[static_cast<size_t>(i)].second, i);  // the order of the parts
      ++of[done[static_cast<size_t>(i)].first];
    }
    EXPECT_EQ(of[2], kOfTheSlow);
    EXPECT_GE(of[0], 2);
    EXPECT_GE(of[1], 2);

    const auto some = remote_async_call<&rank_of>(at::arange(20), {.partitioner = balanced({"worker1", 2})}).get();
    EXPECT_EQ(std::set<int>(some.begin(), some.end()), (std::set{1, 2}));
  });
}

TEST_P(Remote, AnyWorker) {
  lead(3, [](World&) {
    const auto one = remote_sync_call<&rank_of>(at::arange(5), {.partitioner = any_worker({1, "worker2"})});
    ASSERT_EQ(one.size(), 1u);
    EXPECT_TRUE(one[0] == 1 || one[0] == 2);
    remote_sync_call<&note>("any", at::arange(3), {.partitioner = any_worker(), .max_retries = 1});
    EXPECT_EQ(World::current().store().add("any", 0), 3);
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { get_worker_id(any_worker()); }), "names no worker");
    EXPECT_THROW(remote_sync_call<&rank_of>(at::arange(5), {.partitioner = any_worker({"nobody"})}), InvalidArgument);
    EXPECT_THROW(dim_partitioner(0, {.balanced = true}), InvalidArgument);
    // Each part has its own candidates; any_worker() means all, whatever other parts name.
    const auto split = [](const Tensor& x) {
      std::vector<RemotePart<Tensor>> parts;
      for (int i = 0; i < 12; ++i) parts.push_back({any_worker({1 + i % 2}), {x}});
      for (int i = 0; i < 12; ++i) parts.push_back({any_worker(), {x}});
      parts.push_back({0, {x}});
      return parts;
    };
    const auto where = remote_sync_call<&rank_of>(at::arange(5), {.partitioner = split});
    for (size_t i = 0; i < 12; ++i) EXPECT_EQ(where[i], static_cast<int>(1 + i % 2));
    EXPECT_EQ(where.back(), 0);
    std::set<int> one_each;  // calls of one part each go to all workers, too
    for (int i = 0; i < 9; ++i)
      one_each.insert(remote_sync_call<&rank_of>(at::arange(5), {.partitioner = any_worker()})[0]);
    EXPECT_EQ(one_each, (std::set{0, 1, 2}));
    // Errors and cancellation are those of any call.
    EXPECT_CONTAINS(message_of<RemoteError>([] {
                      remote_sync_call<&fails_in_part_2>(
                          "any fails ", at::arange(3),
                          {.partitioner = dim_partitioner(0, {.exclusive = true, .balanced = true}), .max_retries = 3});
                    }),
                    "no such row [part 2 of 3]");
    for (const int part : {0, 1}) World::current().store().get("any fails stopped" + text_of(part), patience());
    const auto never = remote_async_call<&never_ends>("any ", at::arange(1), {.partitioner = any_worker({1})});
    World::current().store().get("any begun0", patience());
    EXPECT_TRUE(never.cancel());
    World::current().store().get("any stopped0", patience());
  });
}

// What waits for a worker is sent late: not if it has changed meanwhile, and not if the call has failed.
Tensor when_told(std::string key, Tensor x) {
  World::current().store().get(key, patience());
  return x;
}
int fails_in_row_0(Tensor x) {
  if (x.item<int64_t>() == 0) throw std::out_of_range("no such row");
  return 0;
}

TEST_P(Remote, PartsThatWait) {
  lead(2, [](World& world) {
    const auto balanced = dim_partitioner(0, {.exclusive = true, .keepdim = false, .balanced = true});
    for (const int retries : {0, 1}) {
      const Tensor x = at::arange(8);
      const std::string key = "told " + std::to_string(retries);
      const auto results = remote_async_call<&when_told>(key, x, {.partitioner = balanced, .max_retries = retries});
      x.add_(1);
      world.store().set(key, "");
      EXPECT_CONTAINS(message_of<InvalidArgument>([&] { results.get(); }), "was changed in place before the part was");
    }
    EXPECT_THROW(remote_sync_call<&fails_in_row_0>(at::arange(20'000), {.partitioner = balanced}), RemoteError);
    EXPECT_EQ(remote_sync_call<&rank_of>(at::arange(2'000), {.partitioner = balanced}).size(), 2'000u);
    // What cannot be sent is the call's own error.
    const Tensor sparse = at::eye(2).to_sparse();
    EXPECT_THROW((void)remote_async_call<&doubled>(sparse, {.partitioner = 1, .max_retries = 1}), InvalidArgument);
  });
}

// The graph holds the arguments for another call; not in a cycle, if they depend on the result later.
TEST_P(Remote, ArgumentsThatAreKeptAreNotKeptForEver) {
  lead(2, [](World&) {
    {
      const Tensor weight = at::ones({3}).set_requires_grad(true);
      Tensor hidden = weight * 2;
      const Tensor result = remote_sync_call<&doubled>(hidden, {.partitioner = 1, .max_retries = 1})[0];
      EXPECT_TRUE(result.requires_grad());
      hidden.add_(result);
    }
    expect_nothing_left();
  });
}

TEST_P(Remote, ArgumentsAreConvertedAndTheRestGoesToAllParts) {
  lead(2, [](World&) {
    const std::map<std::string, Tensor> batch{{"a", at::ones({6})}, {"b", at::arange(6)}};
    const std::string_view which = "b";
    const std::array<double, 2> weights{2, 3};
    EXPECT_EQ(remote_sync_call<&weighted>(batch, which, std::span(weights)), (std::vector<double>{6, 24}));
    EXPECT_EQ(remote_sync_call<&weighted>(batch, "a", std::vector{1.0}, {.reducer = mean_reducer}), 3);
    remote_sync_call<&note>("noted", at::ones({5}));  // returns nothing
    remote_async_call<&note>("noted", at::ones({5})).get();
    EXPECT_EQ(World::current().store().add("noted", 0), 10);
    EXPECT_EQ(
        (remote_sync_call<&note, size_t>("noted", at::ones({5}), {.reducer = [](auto parts) { return parts.size(); }})),
        2u);
  });
}

TEST_P(Remote, TensorsKeepAskingForGradients) {
  lead(2, [](World&) {
    const Tensor x = at::ones({2}).requires_grad_(), plain = at::ones({2});
    using Answers = std::vector<std::pair<bool, bool>>;
    EXPECT_EQ(remote_sync_call<&asks>(x, plain), (Answers{{true, false}, {true, false}}));
    EXPECT_EQ(remote_sync_call<&asks>(plain, x), (Answers{{false, true}, {false, true}}));
  });
}

// --- results ---

TEST_P(Remote, ReducersCombine) {
  serve(3, [](World&) {
    const Tensor x = at::rand({9, 2});
    EXPECT_TRUE(at::allclose(remote_sync_call<&mean_of>(x, {.reducer = mean_reducer}), x.mean()));
    EXPECT_TRUE(at::allclose(remote_async_call<&mean_of>(x, {.reducer = sum_reducer}).get(), x.mean() * 3));
    EXPECT_EQ((remote_sync_call<&doubled, std::string>(x, {.reducer =
                                                               [](const std::vector<Tensor>& all) {
                                                                 std::string sizes;
                                                                 for (const Tensor& t : all)
                                                                   sizes += std::to_string(t.size(0));
                                                                 return sizes;
                                                               }})),
              "333");
    EXPECT_EQ(remote_sync_call<&size_of>(x, {.reducer = sum_reducer}), 18);  // a coroutine
    EXPECT_EQ(remote_sync_call<[](Tensor t) { return t.size(0); }>(x), (std::vector<int64_t>{3, 3, 3}));
    const auto bad = [](const std::vector<Tensor>&) -> Tensor { throw std::domain_error("in the reducer"); };
    EXPECT_THROW(remote_sync_call<&doubled>(x, {.reducer = bad}), std::domain_error);
    EXPECT_THROW(remote_async_call<&doubled>(x, {.reducer = bad}).get(), std::domain_error);
  });
}

TEST_P(Remote, AnAsynchronousReducerHasTheCallersGradMode) {
  lead(2, [](World&) {
    const auto grad_mode = [] {
      return remote_async_call<&doubled, bool>(
                 at::ones({2}), {.reducer = [](const std::vector<Tensor>&) { return at::GradMode::is_enabled(); }})
          .get();
    };
    EXPECT_TRUE(grad_mode());
    const at::NoGradGuard guard;
    EXPECT_FALSE(grad_mode());
  });
}

const auto parallel_mean = parallelize<&mean_of>();  // before any World exists
Tensor mean_through_others(Tensor x) { return parallel_mean(x); }
rpc::Task<Tensor> mean_awaited(Tensor x) {
  const auto rows = dim_partitioner(0, {.workers = {"worker0", "worker2"}});
  const Tensor even = co_await remote_async_call<&mean_of>(x, {.reducer = mean_reducer});
  const Tensor uneven = co_await remote_async_call<&mean_of>(x, {.partitioner = rows, .reducer = mean_reducer});
  co_await remote_async_call<&mean_of>(x, {.partitioner = "worker1"});
  co_return uneven.defined() ? even : uneven;
}

TEST_P(Remote, ParallelFunctions) {
  serve(3, [](World&) {
    const Tensor x = at::rand({9, 2});
    EXPECT_TRUE(at::allclose(parallel_mean(x), x.mean()));
    const auto parts = parallelize_sync<&doubled>({.partitioner = dim_partitioner(1), .timeout = kPatience});
    EXPECT_TRUE(at::equal(at::cat(parts(x), 1), x * 2));
    const auto later = parallelize_async<&doubled>({.reducer = sum_reducer});
    EXPECT_TRUE(at::allclose(later(x).get(), 2 * x.reshape({3, 3, 2}).sum(0)));
    EXPECT_EQ(parallelize<&who_and_what>({.partitioner = "worker2"})(x)[0].first, 2);
    parallelize<&note>()("parallel", x);
    // Parallel calls within parallel calls: waiting handlers do not use up the threads.
    const auto outer = parallelize<&mean_through_others>({.timeout = kPatience});
    EXPECT_TRUE(at::allclose(outer(x), x.mean()));
    EXPECT_TRUE(at::allclose(parallelize<&mean_awaited>()(x), x.mean()));
    std::vector<rpc::Future<Tensor>> many;
    const auto inner = parallelize_async<&mean_through_others>();
    for (int i = 0; i < 20; ++i) many.push_back(inner(x));
    for (auto& one : many) EXPECT_TRUE(at::allclose(one.get(), x.mean()));
  });
}

TEST_P(Remote, FromSeveralThreads) {
  lead(2, [](World& world) {
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        const World::Scope scope(world);
        for (int i = 0; i < 30; ++i) {
          const Tensor x = at::full({4}, t * 100 + i);
          wrong += !at::equal(parallel_mean(x.to(at::kFloat)), x[0].to(at::kFloat));
        }
      });
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
  });
}

TEST_P(Remote, ManyParts) {
  lead(2, [](World&) {
    const Tensor x = at::arange(3000);
    const auto parts = remote_async_call<&doubled>(x, {.partitioner = exclusive_batch_partitioner}).get();
    EXPECT_TRUE(at::equal(at::cat(parts), x * 2));
    EXPECT_EQ(rpc::census().pending_calls, 0u);
  });
}

TEST_P(Remote, AMovedTensorForOneWorkerChangesHands) {
  lead(2, [](World& world) {
    Tensor x = world.heap().zeros({1 << 18});
    const void* const where = x.const_data_ptr();
    const auto back = remote_sync_call<[](Tensor t) { return t; }>(std::move(x), {.partitioner = 1});
    const bool near = rpc::worker_info(0).host == rpc::worker_info(1).host;
    EXPECT_EQ(back[0].const_data_ptr() == where, near);
  });
}

// --- failures ---

TEST_P(Remote, TheFirstPartThatFailsEndsTheCall) {
  lead(3, [](World& world) {
    const auto fail = [&](const std::string& key, auto&& call) {
      try {
        call(key, at::arange(3));
        ADD_FAILURE() << "nothing was thrown";
      } catch (const RemoteError& error) {
        EXPECT_EQ(error.worker(), "worker2");
        EXPECT_EQ(error.type(), "std::out_of_range");
        EXPECT_CONTAINS(error.what(), "no such row [part 2 of 3]");
      }
      for (const int other : {0, 1}) wait_for(world, key + "stopped" + text_of(other));
    };
    fail("s", [](auto&& key, const Tensor& x) { remote_sync_call<&fails_in_part_2>(key, x); });
    fail("a", [](auto&& key, const Tensor& x) { remote_async_call<&fails_in_part_2>(key, x).get(); });
    fail("r",
         [](auto&& key, const Tensor& x) { parallelize<&fails_in_part_2, int>({.reducer = sum_reducer})(key, x); });
  });
}

TEST_P(Remote, TimeoutsSayThePart) {
  lead(2, [](World&) {
    const auto late = message_of<TimeoutError>([] {
      remote_sync_call<[](std::string key, Tensor x) {
        if (x.item<int64_t>() == 1) until_cancelled(key, 1);
      }>("t", at::arange(2), {.timeout = 6000ms});
    });
    EXPECT_CONTAINS(late, "worker1");
    EXPECT_CONTAINS(late, "[part 1 of 2]");
    // The part has stopped. Or it has never begun, if worker 1 was late, and then it reports nothing.
    const auto until = patience();
    while (!until.passed() && rpc::sync<[] { return rpc::census().running_handlers; }>(1) > 1)
      std::this_thread::yield();
    EXPECT_FALSE(until.passed());
  });
}

TEST_P(Remote, CancellingTheFutureCancelsTheParts) {
  lead(2, [](World& world) {
    const auto call = remote_async_call<&never_ends>("c", at::arange(2));
    for (const int part : {0, 1}) wait_for(world, "cbegun" + text_of(part));
    EXPECT_TRUE(call.cancel());
    for (const int part : {0, 1}) wait_for(world, "cstopped" + text_of(part));
    EXPECT_THROW(call.get(), Aborted);
  });
}

TEST_P(Remote, WhatIsWrongBeforehandIsNotSent) {
  lead(2, [](World& world) {
    const auto unsent = [&](auto&& call, const char* says) {
      EXPECT_CONTAINS(message_of<InvalidArgument>(call), says);
      EXPECT_EQ(world.store().add("sent", 0), 0);
    };
    unsent([] { remote_sync_call<&note>("sent", at::ones({})); }, "0 dimensions");
    unsent([] { remote_async_call<&note>("sent", at::ones({2}), {.partitioner = 2}); }, "no worker 2");
    unsent(
        [] {
          remote_sync_call<&note>("sent", at::ones({2}),
                                  {.partitioner = dim_partitioner(0, {.workers = {0, "nobody"}})});
        },
        "nobody");
    // A value that cannot be sent is found while sending.
    EXPECT_CONTAINS(message_of<InvalidArgument>([] {
                      const auto sparse_last = [](const std::string& key, const Tensor& x) {
                        return std::vector<RemotePart<std::string, Tensor>>{{0, {key, x}}, {1, {key, x.to_sparse()}}};
                      };
                      remote_sync_call<&note>("other", at::ones({2}), {.partitioner = sparse_last});
                    }),
                    "[part 1 of 2]");
  });
}

TEST_P(Remote, AWorkerThatLeavesIsNamed) {
  run(3, [](World& world) {
    rpc::init();
    if (world.rank() == 2) {
      // Waits for all parts: a part that is cancelled before it begins never begins, and reports nothing.
      for (const int part : {0, 1, 2}) wait_for(world, "lbegun" + text_of(part));
      rpc::shutdown(rpc::Shutdown::kAbrupt);
      return;
    }
    if (world.rank() == 0) {
      const auto lost = message_of<PeerLost>([] { remote_sync_call<&never_ends>("l", at::arange(3)); });
      EXPECT_CONTAINS(lost, "worker2");
      EXPECT_CONTAINS(lost, "[part 2 of 3]");
      for (const int other : {0, 1}) wait_for(world, "lstopped" + text_of(other));
      const auto rest = dim_partitioner(0, {.workers = {0, 1}});  // the others go on
      EXPECT_EQ(remote_sync_call<&rank_of>(at::arange(4), {.partitioner = rest}), (std::vector{0, 1}));
    }
    EXPECT_THROW(rpc::shutdown(), PeerLost);
  });
}

TEST_P(Remote, WithoutRpc) {
  run(1, [](World&) {
    EXPECT_THROW(remote_sync_call<&doubled>(at::ones({2})), Aborted);
    EXPECT_THROW(parallel_mean(at::ones({2})), Aborted);
    EXPECT_THROW(get_worker_id(), Aborted);
  });
}

MUSTER_RPC_CONTRACT(Remote, Remote);

}  // namespace
}  // namespace muster::test
