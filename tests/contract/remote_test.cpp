// Map and reduce over workers: one suite, over shared memory and (between faked hosts) over TCP, between threads and
// processes. How arguments become parts is in remote_parts_test.cpp.
#include <ATen/core/grad_mode.h>

#include <atomic>
#include <vector>

#include "contract/remote_fixture.h"
#include "muster/base/error.h"

namespace muster::test::mapped_calls {
namespace {

// --- the functions that are called ---

Tensor mean_of(Tensor x) { return x.mean(); }

rpc::Task<int64_t> size_of(Tensor x) { co_return x.numel(); }

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
}  // namespace muster::test::mapped_calls
