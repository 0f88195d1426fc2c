// World: how ranks find each other; the heap; and the fake backend. The environments of launchers are in
// comm_init_test.cpp.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <sched.h>

#include <functional>
#include <thread>
#include <vector>

#include "base/cores.h"
#include "base/text.h"
#include "comm/backends/registry.h"
#include "comm/world/world_parts.h"
#include "comm/world/world_starter.h"
#include "muster/comm/collectives.h"
#include "support/forked.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// --- the World itself ---

TEST(World, PlacementIsChecked) {
  const auto store = make_memory_store();
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { World({.rank = 0, .world_size = 0}, store); }),
                  "the number of ranks: expected 1 or more, got 0");
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { World({.rank = 2, .world_size = 2}, store); }),
                  "rank: expected 0 to 1 in a world of 2, got 2");
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { World({.rank = -1, .world_size = 2}, store); }),
                  "rank: expected 0 to 1 in a world of 2, got -1");
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { World({.rank = 0, .world_size = 1}, nullptr); }), "store");
  WorldOptions options;
  options.backend = "carrier pigeon";
  const auto unknown = message_of<InvalidArgument>([&] { World({}, store, options); });
  EXPECT_CONTAINS(unknown, "carrier pigeon");
  EXPECT_CONTAINS(unknown, "shm");
  EXPECT_THROW(run_threads(0, [](World&) {}), InvalidArgument);
}

TEST(World, KnowsItsPlace) {
  run_threads(3, [](World& world) {
    EXPECT_EQ(world.world_size(), 3);
    EXPECT_EQ(world.local_world_size(), 3);
    EXPECT_EQ(world.local_rank(), world.rank());
    EXPECT_EQ(world.node_rank(), 0);
    EXPECT_EQ(&World::current(), &world);
    EXPECT_EQ(world.group().ranks(), (std::vector<int>{0, 1, 2}));
  });
}

TEST(World, TwoClaimsOfOneRankAreMismatchOrTimeout) {
  const auto store = make_memory_store();
  const auto join = [&](int rank, int size) {
    try {
      World({.rank = rank, .world_size = size}, store);
      ADD_FAILURE() << "rank " << rank << " of " << size << " came in";
    } catch (const Mismatch& error) {
      EXPECT_CONTAINS(error.what(), "expects a group of 2 ranks");
    }
  };
  std::thread other([&] { join(1, 2); });
  join(0, 3);
  other.join();
}

TEST(World, TimeoutOfTheStartNamesWhoDidNotCome) {
  const auto store = make_memory_store();
  const auto join = [&](int rank, milliseconds timeout) {
    WorldOptions options;
    options.timeout = timeout;
    try {
      World({.rank = rank, .world_size = 4}, store, options);
      ADD_FAILURE() << "two ranks made a World of four";
    } catch (const TimeoutError& timeout) {
      EXPECT_EQ(timeout.missing(), (std::vector<int>{2, 3}));
      EXPECT_CONTAINS(timeout.what(), "2, 3");
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  };
  std::thread other([&] { join(1, kPatience); });
  while (store->num_keys() == 0) std::this_thread::yield();  // until rank 1 has come
  join(0, milliseconds(300));
  other.join();
  WorldOptions options;
  options.timeout = milliseconds(300);
  EXPECT_CONTAINS(message_of<TimeoutError>([&] { World({.rank = 1, .world_size = 2}, make_memory_store(), options); }),
                  "rank 0 did not come");
}

TEST(World, RunThreadsThrowsTheCauseAndNotTheEcho) {
  for (const int culprit : {0, 1, 2})
    EXPECT_EQ(message_of<std::runtime_error>([&] {
                run_threads(3, [&](World& world) {
                  if (world.rank() == culprit) throw std::runtime_error("the cause");
                  barrier();
                });
              }),
              "the cause");
  // A rank that simply leaves causes a PeerLost.
  EXPECT_THROW(run_threads(2,
                           [](World& world) {
                             if (world.rank() == 0) barrier();
                           }),
               PeerLost);
  try {
    run_threads(2, [](World& world) {
      if (world.rank() == 0) throw 42;
      barrier();
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (int thrown) {
    EXPECT_EQ(thrown, 42);
  }
}

TEST(World, NamesOfHostsMayHaveSpaces) {
  comm::WorldStarter({"rack 1", "rack 2", "rack 1"}).run_threads(3, [](World& world) {
    const auto& members = world.parts().members;
    EXPECT_EQ(members[0].host, members[2].host);
    EXPECT_NE(members[0].host, members[1].host);
  });
}

TEST(World, CurrentBelongsToAThread) {
  EXPECT_EQ(World::current_or_null(), nullptr);
  EXPECT_CONTAINS(message_of<Aborted>([] { World::current(); }), "no World");
  EXPECT_THROW(barrier(), Aborted);
  EXPECT_THROW(all_reduce(at::ones({1})), Aborted);
  run_threads(1, [](World& world) {
    std::thread([&] {
      EXPECT_EQ(World::current_or_null(), nullptr);
      {
        const World::Scope scope(world);
        EXPECT_EQ(&World::current(), &world);
        run_threads(2, [&](World& inner) { EXPECT_EQ(&World::current(), &inner); });  // nested
        {
          World other({}, make_memory_store());
          const World::Scope deeper(other);
          EXPECT_EQ(&World::current(), &other);
        }
        EXPECT_EQ(&World::current(), &world);
      }
      EXPECT_EQ(World::current_or_null(), nullptr);
    }).join();
  });
  EXPECT_EQ(World::current_or_null(), nullptr);
}

TEST(World, MovesAndCloses) {
  World world = init();  // one rank alone
  EXPECT_EQ(world.world_size(), 1);
  EXPECT_EQ(&World::current(), &world);
  World moved = std::move(world);
  EXPECT_EQ(&World::current(), &moved);
  all_reduce(at::ones({3}));
  barrier();
  moved = init();  // the old one closes
  EXPECT_EQ(&World::current(), &moved);
  all_reduce(at::ones({3}));
  { World gone = std::move(moved); }
  EXPECT_EQ(World::current_or_null(), nullptr);
}

TEST(World, OneAfterAnotherLeavesNothing) {
  const auto once = [] {
    run_threads(3, [](World& world) {
      at::Tensor t = world.heap().zeros({100'000});
      all_reduce(t);
      all_reduce_async(t).wait();
      if (world.rank() == 0)
        isend(t, 1).wait();
      else if (world.rank() == 1)
        irecv(t, 0).wait();
      world.new_group({0, 2});
    });
  };
  once();  // makes what is made once per process
  const auto before = leftovers();
  for (int i = 0; i < (kSanitized ? 5 : 50); ++i) once();
  EXPECT_EQ(leftovers(), before);
}

TEST(World, ManyInOneProcessAtOnce) {
  std::vector<std::thread> jobs;
  for (int job = 0; job < 4; ++job)
    jobs.emplace_back([job] {
      run_threads(2, [&](World&) {
        for (int i = 0; i < 50; ++i) {
          const at::Tensor t = at::ones({2000}) * (job + 1);
          all_reduce(t);
          ASSERT_EQ(t[0].item<float>(), 2 * (job + 1));
        }
      });
    });
  for (auto& job : jobs) job.join();
}

// --- the heap ---

TEST(Heap, GivesTensorsLikeAnyOther) {
  run_threads(1, [](World& world) {
    Heap& heap = world.heap();
    const at::Tensor t = heap.zeros({3, 5}, at::kDouble);
    EXPECT_EQ(t.sizes(), (at::IntArrayRef{3, 5}));
    EXPECT_TRUE(t.is_contiguous());
    EXPECT_EQ(t.sum().item<double>(), 0);
    EXPECT_TRUE(heap.contains(t.const_data_ptr()));
    EXPECT_TRUE(heap.contains(t[2].const_data_ptr()));
    EXPECT_FALSE(heap.contains(at::ones({3}).const_data_ptr()));
    EXPECT_FALSE(heap.contains(nullptr));
    EXPECT_GE(heap.used(), t.nbytes());
    EXPECT_GE(heap.committed(), heap.used());
    EXPECT_GE(heap.capacity(), heap.committed());
    EXPECT_EQ(heap.empty({}).dim(), 0);
    EXPECT_EQ(heap.empty({0}).numel(), 0);
    EXPECT_EQ(heap.zeros({7}, at::kBool).scalar_type(), at::kBool);
    const c10::DataPtr raw = heap.allocate(100);  // the function of c10::Allocator
    EXPECT_TRUE(heap.contains(raw.get()));
    EXPECT_TRUE(heap.contains(heap.clone(t.const_data_ptr(), t.nbytes()).get()));
  });
}

TEST(Heap, FreesAndUsesAgain) {
  WorldOptions options;
  options.heap_capacity = 8 << 20;
  run_threads(
      1,
      [](World& world) {
        Heap& heap = world.heap();
        EXPECT_EQ(heap.used(), 0u);
        for (int i = 0; i < 100; ++i) {
          const at::Tensor a = heap.empty({1 << 20}, at::kByte), b = heap.empty({(1 << 20) + i * 100}, at::kByte);
          EXPECT_GE(heap.used(), 2u << 20);
        }
        EXPECT_EQ(heap.used(), 0u);
        EXPECT_LE(heap.committed(), 4u << 20);
      },
      options);
}

TEST(Heap, FullIsUnavailableWithTheFigures) {
  WorldOptions options;
  options.heap_capacity = 4 << 20;
  run_threads(
      1,
      [](World& world) {
        Heap& heap = world.heap();
        EXPECT_EQ(heap.capacity(), 4u << 20);
        {
          const at::Tensor half = heap.empty({2 << 20}, at::kByte);
          const auto text = message_of<Unavailable>([&] { heap.empty({3 << 20}, at::kByte); });
          EXPECT_CONTAINS(text, "heap_capacity");
          EXPECT_CONTAINS(text, "4194304");
          const at::Tensor quarter = heap.empty({1 << 20}, at::kByte);  // the heap still works
        }
        const at::Tensor all = heap.empty({4 << 20}, at::kByte);  // the whole of it
        EXPECT_THROW(heap.empty({1}, at::kByte), Unavailable);
        EXPECT_THROW(heap.empty({int64_t{1} << 50}, at::kByte), Unavailable);
      },
      options);
}

TEST(Heap, TensorsOutliveTheWorld) {
  std::vector<at::Tensor> kept(2);
  run_threads(2, [&](World& world) {
    at::Tensor t = world.heap().zeros({500'000});
    t.fill_(world.rank() + 1);
    all_reduce(t);
    kept[static_cast<size_t>(world.rank())] = t;
  });
  for (auto& t : kept) {
    EXPECT_TRUE((t == 3).all().item<bool>());
    t.fill_(7);
    EXPECT_TRUE((t == 7).all().item<bool>());
  }
}

// What a storage asks for memory is there as long as the storage.
TEST(Heap, TensorsMayGrowAfterTheWorld) {
  at::Tensor grown, emptied;
  run_threads(1, [&](World& world) {
    grown = world.heap().zeros({4}).fill_(3);
    emptied = world.heap().zeros({4});
  });
  grown.resize_({1000});
  EXPECT_TRUE(grown.narrow(0, 0, 4).eq(3).all().item<bool>());
  emptied.resize_({0});
  emptied.resize_({1000}).fill_(2);
  EXPECT_EQ(emptied.sum().item<float>(), 2000);
}

TEST(Heap, RefusesWhatNoHeapHolds) {
  run_threads(1, [](World& world) {
    for (const size_t bytes : {~size_t{0}, ~size_t{0} - 4096, world.heap().capacity() + 1})
      EXPECT_THROW(world.heap().allocate(bytes), Unavailable);
    EXPECT_EQ(world.heap().used(), 0U);
  });
}

TEST(Heap, FromManyThreads) {
  run_threads(1, [](World& world) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&, i] {
        for (int64_t size = 1; size < 200'000; size += size / 3 + 1) {
          const at::Tensor a = world.heap().empty({size}, at::kByte), b = world.heap().empty({2 * size}, at::kByte);
          a.fill_(i);
          b.fill_(i + 100);
          ASSERT_TRUE((a == i).all().item<bool>() && (b == i + 100).all().item<bool>());
        }
      });
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(world.heap().used(), 0u);
  });
}

// If a fault were not injected, a user's test would pass without testing anything.
TEST(World, FaultsThatABackendCannotInjectAreRefused) {
  const auto start = [](const std::string& backend, FaultAction action, const std::string& group,
                        FaultPhase phase = FaultPhase::kStart) {
    WorldOptions options{.backend = backend};
    options.faults.add({.action = action, .rank = 0, .operation = 1000, .phase = phase, .group = group});
    run_threads(
        2, [](World&) { barrier(); }, options);
  };
  for (const std::string backend : {"gloo", "hierarchical"}) {
    EXPECT_CONTAINS(message_of<Unavailable>([&] { start(backend, FaultAction::kCorrupt, "world"); }),
                    "backend '" + backend + "' cannot inject the fault 'corrupt' in phase 'start' in group 'world'");
    start(backend, FaultAction::kCorrupt, "another");
    for (const auto phase : {FaultPhase::kStart, FaultPhase::kMiddle})
      start(backend, FaultAction::kKill, "world", phase);
  }
  start("shm", FaultAction::kCorrupt, "world");
  start("fake", FaultAction::kKill, "world", FaultPhase::kEnd);
  WorldOptions ends{.backend = "fake"};
  ends.faults.add({.action = FaultAction::kKill, .rank = 0, .operation = 2, .phase = FaultPhase::kEnd});
  run_threads(
      2,
      [](World& world) {
        for (int i = 0; i < 2; ++i) barrier();
        if (world.rank() == 1) return barrier();  // another rank's fault
        EXPECT_CONTAINS(message_of<PeerLost>([] { barrier(); }), "rank 0 ended: killed by its FaultPlan");
        EXPECT_THROW(barrier(), Aborted);
      },
      ends);
  EXPECT_CONTAINS(message_of<Unavailable>([&] { start("fake", FaultAction::kKill, "world", FaultPhase::kPosted); }),
                  "backend 'fake' cannot inject the fault 'kill' in phase 'posted'");
}

// Rank 2 reads the others' tensors only after the group has failed. They may have changed meanwhile.
TEST(World, WhatIsReadAfterTheGroupHasFailedDoesNotCount) {
  constexpr int64_t kMany = 3 << 14;
  const std::vector<std::function<void(const at::Tensor&, const at::Tensor&)>> all = {
      [](const at::Tensor& t, const at::Tensor&) { broadcast(t, 0); },
      [](const at::Tensor& t, const at::Tensor&) { all_reduce(t); },
      [](const at::Tensor& t, const at::Tensor& whole) { all_gather_into_tensor(whole, t); },
      [](const at::Tensor& t, const at::Tensor& whole) { reduce_scatter_tensor(t, whole); },
      [](const at::Tensor&, const at::Tensor& whole) { all_to_all_single(whole, whole.clone()); }};
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    WorldOptions options{.backend = "shm", .timeout = std::chrono::milliseconds(100)};
    options.faults.add({.action = FaultAction::kDelay,
                        .rank = 2,
                        .operation = 0,
                        .phase = FaultPhase::kMiddle,
                        .delay = std::chrono::minutes(10)});  // it ends when the group fails
    run_threads(
        3,
        [&](World& world) {
          const at::Tensor t = world.heap().zeros({kMany}), whole = world.heap().zeros({3 * kMany});
          try {
            all[i](t, whole);
            EXPECT_EQ(world.rank(), 1) << "it had read, and nobody waited for it in vain";
          } catch (const TimeoutError&) {
          }
        },
        options);
  }
}

TEST(World, FaultsThatDidNothingAreNamed) {
  const auto said = [](const Fault& fault) {
    WorldOptions options;
    options.faults.add(fault);
    testing::internal::CaptureStderr();
    run_threads(
        2,
        [](World&) {
          barrier();
          all_reduce(at::ones({3}));
        },
        options);
    return testing::internal::GetCapturedStderr();
  };
  using enum FaultAction;
  EXPECT_CONTAINS(said({.action = kDelay, .rank = 0, .operation = 7}),
                  "at operation 7 of rank 0 in group 'world' did nothing");
  EXPECT_CONTAINS(said({.action = kCorrupt, .rank = 1, .operation = 0}), "has no data, or was never reached");
  EXPECT_EQ(said({.action = kCorrupt, .rank = 1, .operation = 1}), "");
  EXPECT_EQ(said({.action = kDelay, .rank = 1, .operation = 1}), "");
  for (const int rank : {-1, 2})
    EXPECT_CONTAINS(said({.action = kDelay, .rank = rank, .operation = 1}),
                    text("fault of rank ", rank, " in group 'world' does nothing, because the group has 2 ranks"));
}

// Ranks that are bound to cores, as by mpirun and srun. Waits spin only if each rank can have its own core.
TEST(WorldFork, BoundRanksKnowTheCoresOfAll) {
  const CpuSet mine = own_cpus();
  if (usable_cores() < 2) GTEST_SKIP() << "there is one core only";
  std::vector<int> cpus;
  for (size_t cpu = 0; cpu < mine.size(); ++cpu)
    if (mine[cpu]) cpus.push_back(static_cast<int>(cpu));
  for (const bool apart : {true, false}) {
    const ForkedJob job;
    ForkedRanks ranks(2, [&](int rank) -> std::string {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpus[apart ? static_cast<size_t>(rank) : 0], &one);
      if (::sched_setaffinity(0, sizeof one, &one) != 0) return "cannot bind";
      World world = job.join(rank, 2);
      return text(world.parts().cores);
    });
    for (const auto& end : ranks.wait_all(patience())) EXPECT_EQ(end.said, apart ? "2" : "1");
  }
}

// --- the fake backend ---

TEST(Fake, OneRankPlaysAThousand) {
  constexpr int kRanks = 1000, kMe = 7;
  WorldOptions options;
  options.backend = "fake";
  World world({.rank = kMe, .world_size = kRanks}, make_memory_store(), options);
  const World::Scope scope(world);
  EXPECT_EQ(world.group().backend_name(), "fake");
  const at::Tensor t = at::full({3}, 2.0);
  all_reduce(t);
  broadcast(t, 999);
  EXPECT_TRUE(t.eq(2).all().item<bool>());
  const at::Tensor all = at::zeros({3 * kRanks});
  all_gather_into_tensor(all, t);
  EXPECT_TRUE(all.eq(2).all().item<bool>());
  const at::Tensor mine = at::zeros({3});
  reduce_scatter_tensor(mine, all + 1);
  EXPECT_TRUE(mine.eq(3).all().item<bool>());
  const at::Tensor mixed = at::zeros({kRanks});
  all_to_all_single(mixed, at::ones({kRanks}));
  EXPECT_TRUE(mixed.eq(1).all().item<bool>());
  barrier();
  send(t, 3);
  EXPECT_EQ(recv(t, kAnySource), 0);
  all_reduce_async(t).wait();
  EXPECT_EQ(world.group().stats().operations, 9u);
  // The fake backend finds a caller's mistakes, too.
  EXPECT_THROW(broadcast(t, kRanks), InvalidArgument);
  EXPECT_THROW(all_gather_into_tensor(at::zeros({5}), t), InvalidArgument);
  const Group some = world.new_group({7, 999});
  all_reduce(t, {.group = some});
  EXPECT_EQ(some.rank(), 0);
  EXPECT_FALSE(world.new_group({1, 2}).is_member());
}

TEST(Backends, TheTableNamesEachOnce) {
  for (const auto& entry : comm::backends()) {
    EXPECT_EQ(&comm::find_backend(std::string(entry.name), true), &entry);
    if (const auto reason = entry.unavailable_reason(); !reason.empty()) {
      WorldOptions options;
      options.backend = std::string(entry.name);
      EXPECT_CONTAINS(message_of<Unavailable>([&] { World({}, make_memory_store(), options); }), reason);
    }
  }
}

}  // namespace
}  // namespace muster::test
