// Works: their futures, their callbacks and who waits for them; and what is known of operations: stragglers and the
// black box.

// GCC 12 with a sanitizer wrongly reports an uninitialised guard in ivalue::Future::addCallback.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <filesystem>
#include <future>
#include <stdexcept>

#include "base/text.h"
#include "comm/core/backend.h"
#include "contract/comm_forms_fixture.h"
#include "muster/comm/collectives.h"
#include "shm/black_box_reader.h"
#include "support/asleep.h"
#include "support/forked.h"
#include "support/patience.h"

namespace muster::test::operation_forms {
namespace {

TEST_P(Forms, FuturesOfWorks) {
  run(2, [](World& world) {
    comm::Backend& backend = comm::backend_of(world.group());
    for (const bool late : {false, true}) {
      std::vector<at::Tensor> list = {at::ones({3})};
      const auto work = backend.allreduce(list, {});
      if (late) work->wait();
      std::atomic<int> called{0};
      const auto future = work->getFuture();
      future->addCallback([&](c10::ivalue::Future& done) {
        called += done.value().toTensorVector()[0].eq(2).all().item<bool>() ? 1 : 100;
      });
      work->wait();
      future->wait();
      EXPECT_TRUE(future->completed());
      EXPECT_FALSE(future->hasError());
      // wait() may return before the callback has run in the queue's thread; the future's own wait does not.
      while (called == 0) std::this_thread::yield();
      EXPECT_EQ(called, 1);
    }
    std::vector<at::Tensor> list = {at::ones({3 + world.rank()})};
    const auto future = backend.allreduce(list, {})->getFuture();
    EXPECT_THROW(future->waitAndThrow(), std::exception);
    EXPECT_TRUE(future->hasError());
  });
}

// What a callback throws ends neither the operation, nor the thread that has run it, nor the wait of another thread.
TEST_P(Forms, CallbacksThatThrow) {
  run(2, [](World& world) {
    comm::Backend& backend = comm::backend_of(world.group());
    const auto start = [&](bool message, std::vector<at::Tensor>& list) {
      if (!message) return backend.allreduce(list, {});
      return world.rank() == 0 ? backend.recv(list, 1, 3) : backend.send(list, 0, 3);
    };
    for (const bool message : {false, true})
      for (const bool waits : {false, true}) {
        const std::string begin = text("begin ", message, waits);
        std::vector<at::Tensor> list = {at::ones({3})};
        if (world.rank() == 1) {
          world.store().get(begin, patience());  // a future that is done calls back, and throws, in addCallback()
          start(message, list)->wait();
          continue;
        }
        const auto work = start(message, list);
        const auto future = work->getFuture();
        std::atomic<bool> called{false};
        future->addCallback([&](c10::ivalue::Future&) {
          called = true;
          throw std::runtime_error("of a callback");
        });
        world.store().set(begin, "");
        if (waits) work->wait();
        future->wait();
        EXPECT_FALSE(future->hasError());
        while (!called) std::this_thread::yield();
        EXPECT_TRUE(list[0].eq(message ? 1 : 2).all().item<bool>());
      }
    at::Tensor again = at::ones({3});
    all_reduce_async(again, {.group = world.group()}).wait();
    EXPECT_TRUE(again.eq(2).all().item<bool>());
  });
}

// Like in the communication hooks of PyTorch's DDP, the callback of one operation issues the next one and waits for it,
// on any thread.
TEST_P(Forms, CallbacksDoAndAwaitOperations) {
  run(2, [](World& world) {
    comm::Backend& backend = comm::backend_of(world.group());
    const auto ones = [] { return std::vector<at::Tensor>{at::ones({3})}; };
    for (const bool waits : {false, true}) {
      const std::string begin = text("begin ", waits);
      std::vector<at::Tensor> first = ones(), second = ones(), third = ones(), fourth = ones();
      if (world.rank() == 1) {
        world.store().get(begin, patience());
        for (auto* list : {&first, &second, &third, &fourth}) backend.allreduce(*list, {})->wait();
        continue;
      }
      const auto work = backend.allreduce(first, {});
      std::promise<void> over;
      work->getFuture()->addCallback([&](c10::ivalue::Future&) {
        backend.allreduce(second, {})->wait();
        backend.allreduce(third, {})->getFuture()->wait();
        all_reduce(fourth[0], {.group = world.group()});
        over.set_value();
      });
      world.store().set(begin, "");
      if (waits) work->wait();
      auto ended = over.get_future();
      ASSERT_EQ(ended.wait_for(kPatience), std::future_status::ready);
      for (const auto& list : {first, second, third, fourth}) EXPECT_TRUE(list[0].eq(2).all().item<bool>());
    }
  });
}

// So may that of a message, for messages issued before and after, while the thread that moves them is in the callback.
TEST_P(Forms, CallbacksOfMessagesAwaitMessages) {
  run(2, [](World& world) {
    constexpr int kMessages = 6;
    if (world.rank() == 1) {
      send(at::zeros({3}), 0, {.tag = 0});
      world.store().get("in callback", patience());
      for (int tag = 1; tag < kMessages; ++tag) send(at::full({3}, tag, at::kFloat), 0, {.tag = tag});
      return;
    }
    std::vector<at::Tensor> tensors;
    for (int tag = 0; tag < kMessages; ++tag) tensors.push_back(at::zeros({3}));
    const auto receive = [&](int tag) {
      return irecv(tensors[static_cast<size_t>(tag)], 1, {.tag = tag, .group = world.group()});
    };
    Work early = receive(kMessages - 1);
    std::promise<void> over;
    receive(0).c10d_work()->getFuture()->addCallback([&](c10::ivalue::Future&) {
      world.store().set("in callback", "");
      receive(1).c10d_work()->getFuture()->wait();
      receive(2).wait();
      recv(tensors[3], 1, {.tag = 3, .group = world.group()});
      receive(4).c10d_work()->getFuture()->addCallback([&](c10::ivalue::Future&) {  // in a callback's callback
        early.c10d_work()->getFuture()->wait();
        over.set_value();
      });
    });
    auto ended = over.get_future();
    ASSERT_EQ(ended.wait_for(kPatience), std::future_status::ready);
    for (int tag = 0; tag < kMessages; ++tag)
      EXPECT_TRUE(tensors[static_cast<size_t>(tag)].eq(tag).all().item<bool>()) << tag;
  });
}

// Works that no thread waits for, that are waited for out of order, and from another thread, while the queue runs.
TEST_P(Forms, WaitersRunWhatTheyWaitFor) {
  run(2, [](World& world) {
    for (int round = 0; round < 30; ++round) {
      std::vector<at::Tensor> tensors;
      std::vector<Work> works;
      for (int i = 0; i < 8; ++i) {
        tensors.push_back(at::full({1 + 700 * i}, world.rank() + i));
        works.push_back(all_reduce_async(tensors.back()));
      }
      std::thread other([&] { works[5].wait(); });
      works[7].wait();
      works[2].wait();
      other.join();
      barrier();
      for (int i = 0; i < 8; ++i) {
        EXPECT_TRUE(works[static_cast<size_t>(i)].is_completed()) << "a barrier comes after what was issued before";
        EXPECT_TRUE(tensors[static_cast<size_t>(i)].eq(1 + 2 * i).all().item<bool>());
      }
    }
  });
}

// All ranks know who comes last, how often and by how much.
TEST_P(Forms, StragglersAreNamed) {
  if (GetParam().backend != "shm") GTEST_SKIP() << "only ranks that share a clock measure microseconds; see below";
  run(3, [](World& world) {
    EXPECT_EQ(world.group().straggler_report(), "");
    constexpr int kTimes = 20;
    for (int i = 0; i < kTimes; ++i) {
      const auto waits = [i](int rank) { return text("in ", i, " waits ", rank); };
      std::optional<OnceAsleep> watch;
      if (world.rank() != 2)
        watch.emplace([&] { world.store().set(waits(world.rank()), "1"); });
      else
        world.store().wait({waits(0), waits(1)}, patience());
      if (i % 2)
        barrier();
      else
        all_reduce(at::ones({10'000}));
    }
    const auto ranks = world.group().stragglers();
    ASSERT_EQ(ranks.size(), 3u);
    for (const size_t rank : {0, 1}) EXPECT_EQ(ranks[rank].times_last, 0u);
    EXPECT_EQ(ranks[2].times_last, static_cast<uint64_t>(kTimes));
    EXPECT_GT(ranks[2].late.count(), 0);
    const auto verdict = world.group().straggler_report();
    EXPECT_CONTAINS(verdict, "rank 2 came last to ");
    EXPECT_CONTAINS(verdict, " of 20 collectives of group 'world'");
  });
}

// A rank tells with the next collective how long it waited, so the last one is not counted.
TEST_P(Forms, StragglersAreNamedOverAWire) {
  if (GetParam().backend == "shm") GTEST_SKIP() << "shm has no wire";
  run(3, [](World& world) {
    constexpr int kTimes = 40;
    for (int i = 0; i < kTimes; ++i) {
      if (world.rank() == 2) std::this_thread::sleep_for(milliseconds(15));  // what is measured
      if (i % 2)
        barrier();
      else
        all_reduce(at::ones({10'000}));
    }
    const auto ranks = world.group().stragglers();
    ASSERT_EQ(ranks.size(), 3u);
    EXPECT_EQ(ranks[0].times_last + ranks[1].times_last + ranks[2].times_last, uint64_t{kTimes - 1});
    EXPECT_GE(ranks[2].times_last, uint64_t{kTimes * 3 / 4});
    const auto verdict = world.group().straggler_report();
    EXPECT_CONTAINS(verdict, "rank 2 came last to ");
    EXPECT_CONTAINS(verdict, " of 39 collectives of group 'world'");
  });
}

// The box of this thread's rank, found by the rank in its memory.
shm::BlackBoxSnapshot black_box_of(const World& world) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    if (std::filesystem::read_symlink(entry.path(), error).string().find(shm::kBlackBoxName) == std::string::npos)
      continue;
    auto box = shm::read_black_box(std::stoi(entry.path().filename().string()));
    if (box.rank == world.rank() && box.world_size == world.world_size()) return box;
  }
  throw std::runtime_error("no black box");
}

// The rank's black box has every operation with its number, size and result.
TEST_P(Forms, TheBlackBoxKnowsEveryOperation) {
  run_threads_only(2, [](World& world) {
    all_reduce(at::ones({100}));
    auto work = broadcast_async(at::ones({5}, at::kDouble), 1);
    work.wait();
    const Group other = world.new_group({1, 0});
    barrier({.group = other});
    if (world.rank() == 0)
      send(at::ones({3}), 1, {.tag = 4});
    else
      recv(at::ones({3}), 0, {.tag = 4});
    EXPECT_THROW(all_reduce(at::ones({100 + world.rank()})), Mismatch);
    EXPECT_THROW(isend(at::ones({3}), 1 - world.rank()), Mismatch);  // it does not even begin
    // No rank's box is destroyed while others look at all boxes. (The ranks meet at the store: the group has failed.)
    struct Meet {
      Store& store;
      ~Meet() {
        if (store.add("have looked", 1) == 2) store.set("all have looked", "");
        store.get("all have looked", patience());
      }
    } const meet{world.store()};
    const auto box = black_box_of(world);
    std::vector<std::string> lines;
    for (const auto& op : box.operations)
      lines.push_back(text(box.groups[static_cast<size_t>(op.group)].name, ": ", op.name, ' ', op.dtype, ' ', op.bytes,
                           ' ', op.peer, ' ', op.is_collective() ? text('#', op.sequence) : text("tag ", op.tag), ' ',
                           shm::to_string(op.state)));
    const int me = world.rank();
    EXPECT_EQ(lines,
              (std::vector<std::string>{"world: all_reduce Float 400 -1 #0 done",
                                        "world: broadcast Double 40 1 #1 done", "group 1: barrier Byte 0 -1 #0 done",
                                        text("world: ", me == 0 ? "send" : "recv", " Float 12 ", 1 - me, " tag 4 done"),
                                        text("world: all_reduce Float ", 400 + 4 * me, " -1 #2 failed"),
                                        text("world: send Float 12 ", 1 - me, " tag 0 failed")}));
  });
}

// A group without asynchronous collectives has no thread for them. If none can be started, they say so, and the group
// still works.
TEST_P(Forms, AThreadThatCannotStart) {
  if (as_threads()) GTEST_SKIP() << "the limit would be that of all ranks";
  run(1, [](World& world) {
    const Group group = world.new_group({0});
    {
      const NoMoreThreads none;
      const auto said = message_of<Unavailable>([&] { broadcast_async(at::ones({5}), 0, {.group = group}); });
      EXPECT_CONTAINS(said, "cannot start thread 'muster-group 1': Resource temporarily unavailable");
    }
    all_reduce(at::ones({5}), {.group = group});
    const Group messages = world.new_group({0});
    const at::Tensor large = at::ones({1 << 20});
    {
      const NoMoreThreads none;
      const auto said = message_of<Unavailable>([&] { isend(large, 0, {.group = messages}).wait(); });
      EXPECT_CONTAINS(said, "rank 0 cannot move its messages: cannot start thread");
    }
    std::vector<std::string> states;
    for (const auto& op : black_box_of(world).operations)
      states.push_back(text(op.name, ' ', shm::to_string(op.state)));
    EXPECT_EQ(states, (std::vector<std::string>{"broadcast failed", "all_reduce done", "send failed"}));
  });
}

}  // namespace
}  // namespace muster::test::operation_forms
