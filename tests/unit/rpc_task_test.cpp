// Coroutines: values, errors, frames, threads.
#include "muster/rpc/task.h"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <thread>

#include "muster/base/error.h"
#include "support/sanitized.h"

namespace muster::rpc {
namespace {

using test::kSanitized;

Task<int> give(int x) { co_return x; }
Task<int> sum(int n) {
  int all = 0;
  for (int i = 0; i < n; ++i) all += co_await give(1);
  co_return all;
}
Task<> throws() {
  throw std::out_of_range("no");
  co_return;
}
Task<std::unique_ptr<int>> owner() { co_return std::make_unique<int>(3); }
Task<int> outer(Future<int> future) {
  bool caught = false;
  try {
    co_await throws();
  } catch (const std::out_of_range&) {
    caught = true;
  }
  const auto three = co_await owner();
  co_return caught ? co_await future + *three : 0;
}

TEST(RpcTask, ValuesAndErrors) {
  EXPECT_EQ(start(give(4)).get(), 4);
  EXPECT_THROW(start(throws()).get(), std::out_of_range);
  Promise<int> promise;
  const auto future = start(outer(promise.future()));
  EXPECT_FALSE(future.done());
  promise.try_set_value(10);
  EXPECT_EQ(future.get(), 13);
  EXPECT_THROW(start(outer(make_failed_future<int>(std::make_exception_ptr(Aborted("x"))))).get(), Aborted);
  EXPECT_EQ(*start(owner()).get(), 3);
}

Task<std::unique_ptr<int>> awaits(Future<std::unique_ptr<int>> future) { co_return co_await std::move(future); }

TEST(RpcTask, AFutureGivenAwayGivesItsValueAway) {
  EXPECT_EQ(*start(awaits(make_ready_future(std::make_unique<int>(5)))).get(), 5);
}

TEST(RpcTask, IsLazyAndItsFrameGoesWithIt) {
  const auto alive = std::make_shared<int>(1);
  bool ran = false;
  const auto coroutine = [](std::shared_ptr<int> held, bool& ran) -> Task<> {
    ran = held != nullptr;
    co_return;
  };
  {
    const Task<> never = coroutine(alive, ran);
    EXPECT_EQ(alive.use_count(), 2);
  }
  EXPECT_EQ(alive.use_count(), 1);
  EXPECT_FALSE(ran);
  start(coroutine(alive, ran)).get();
  EXPECT_TRUE(ran);
  EXPECT_EQ(alive.use_count(), 1);
}

TEST(RpcTask, ManyAwaitsNeedNoStack) {
  // Without optimisation, as here, GCC makes no tail call of a symmetric transfer.
  EXPECT_EQ(start(sum(1'000'000)).get(), 1'000'000);
}

Task<std::shared_ptr<void>> context_after(Future<int> future) {
  co_await future;
  co_return detail::current_call();
}

TEST(RpcTask, TheCallIsTheSameAfterAWait) {
  const std::shared_ptr<void> call = std::make_shared<int>(), other = std::make_shared<int>();
  Promise<int> promise;
  const auto future = [&] {
    const detail::CallContext::Scope scope({.call = call});
    return start(context_after(promise.future()));
  }();
  EXPECT_EQ(detail::current_call(), nullptr);
  std::thread([&] {
    const detail::CallContext::Scope scope({.call = other});
    promise.try_set_value(1);
    EXPECT_EQ(detail::current_call(), other);  // the thread's own call is restored
  }).join();
  EXPECT_EQ(future.get(), call);
}

Task<bool> records_nothing(Future<int> future) {
  const at::NoGradGuard no_grad;
  co_await future;
  co_return at::GradMode::is_enabled();
}

// A guard that a task holds while it waits is not that of the thread that started it.
TEST(RpcTask, GuardsStayInTheTask) {
  Promise<int> promise;
  const auto future = start(records_nothing(promise.future()));
  EXPECT_TRUE(at::GradMode::is_enabled());
  std::thread([&] {
    promise.try_set_value(1);
    EXPECT_TRUE(at::GradMode::is_enabled());
  }).join();
  EXPECT_FALSE(future.get());
  EXPECT_TRUE(at::GradMode::is_enabled());
}

Task<int> hops(std::vector<Future<int>> futures) {
  int all = 0;
  for (const auto& future : futures) all += co_await future;
  co_return all;
}

Task<int> hop(Future<int> future) { co_return co_await future; }
Task<int> hops_one_by_one(std::vector<Future<int>> futures) {
  int all = 0;
  for (const auto& future : futures) all += co_await hop(future);
  co_return all;
}

// The awaited task ends in another thread: before, while and after the awaiting task is suspended.
TEST(RpcTaskRace, TheSecondOfTwoGoesOn) {
  for (int round = 0; round < (kSanitized ? 50 : 1000); ++round) {
    std::vector<Promise<int>> promises(100);
    std::vector<Future<int>> futures;
    for (auto& promise : promises) futures.push_back(promise.future());
    std::jthread other([&] {
      for (auto& promise : promises) promise.try_set_value(1);
    });
    EXPECT_EQ(start(hops_one_by_one(futures)).get(), 100);
  }
}

TEST(RpcTaskRace, ResumedByWhoeverCompletes) {
  for (int round = 0; round < (kSanitized ? 50 : 1000); ++round) {
    std::vector<Promise<int>> promises(12);
    std::vector<Future<int>> futures;
    for (auto& promise : promises) futures.push_back(promise.future());
    auto result = start(hops(futures));
    std::vector<std::jthread> threads;
    for (size_t t = 0; t < 3; ++t)
      threads.emplace_back([&, t] {
        for (size_t i = t; i < 12; i += 3) promises[i].try_set_value(1);
      });
    EXPECT_EQ(result.get(), 12);
  }
}

}  // namespace
}  // namespace muster::rpc
