// Futures: values, errors, chains, and races between threads that complete one.
#include "muster/rpc/future.h"

#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <thread>

#include "support/full_run.h"
#include "support/sanitized.h"

namespace muster::rpc {
namespace {

using namespace std::chrono_literals;
using test::kSanitized;

std::exception_ptr problem(const char* what) { return std::make_exception_ptr(std::runtime_error(what)); }

TEST(RpcFuture, ValueAndErrorAnyNumberOfTimes) {
  Promise<std::string> promise;
  const auto future = promise.future();
  EXPECT_FALSE(future.done());
  EXPECT_FALSE(future.wait_for(1ms));
  EXPECT_TRUE(promise.try_set_value("value"));
  EXPECT_FALSE(promise.try_set_value("late"));
  EXPECT_FALSE(promise.try_set_error(problem("late")));
  EXPECT_FALSE(future.cancel());
  EXPECT_EQ(future.get(), "value");
  const auto copy = future;
  EXPECT_EQ(copy.get(), "value");
  EXPECT_TRUE(future.wait_for(0s));
  EXPECT_EQ(Future<std::string>(future).get(), "value");

  const auto failed = make_failed_future<int>(problem("why"));
  for (int i = 0; i < 2; ++i) EXPECT_THROW(failed.get(), std::runtime_error);
  failed.wait();
  make_ready_future().get();
}

TEST(RpcFuture, MovesOutWhatCannotBeCopied) {
  auto future = make_ready_future(std::make_unique<int>(4));
  EXPECT_EQ(*std::move(future).get(), 4);
  EXPECT_FALSE(future.valid());
  EXPECT_THROW(future.wait(), InvalidArgument);
  EXPECT_THROW(Future<int>().get(), InvalidArgument);
  EXPECT_THROW(Future<int>().then([](Future<int>) {}), InvalidArgument);
}

TEST(RpcFuture, AnAbandonedPromiseAborts) {
  Future<int> future;
  {
    Promise<int> promise;
    future = promise.future();
    Promise<int> other = std::move(promise);
    EXPECT_FALSE(future.done());
  }
  EXPECT_THROW(future.get(), Aborted);
  Promise<int> replaced;
  future = replaced.future();
  replaced = Promise<int>();
  EXPECT_THROW(future.get(), Aborted);
}

TEST(RpcFuture, AThrowingValueIsAnError) {
  struct Throws {
    explicit Throws(int) { throw std::out_of_range("no"); }
  };
  Promise<Throws> promise;
  EXPECT_TRUE(promise.try_set_value(1));
  EXPECT_NO_THROW(promise.future().wait());
  EXPECT_THROW(promise.future().get(), std::out_of_range);
}

TEST(RpcFuture, ContinuationsRunInOrderBeforeAndAfter) {
  Promise<int> promise;
  std::vector<int> order;
  std::vector<Future<void>> futures;
  for (int i = 0; i < 3; ++i)
    futures.push_back(promise.future().then([&order, i](Future<int> f) { order.push_back(f.get() + i); }));
  auto text = promise.future().then([](Future<int> f) { return std::to_string(f.get()); });
  auto error = text.then([](Future<std::string> f) -> int { throw std::out_of_range(f.get()); });
  auto cured = error.then([](Future<int> f) {
    try {
      return f.get();
    } catch (const std::out_of_range&) {
      return -1;
    }
  });
  promise.try_set_value(10);
  EXPECT_EQ(order, (std::vector{10, 11, 12}));
  EXPECT_EQ(text.get(), "10");
  EXPECT_THROW(error.get(), std::out_of_range);
  EXPECT_EQ(cured.get(), -1);
  EXPECT_TRUE(promise.future().then([](Future<int>) {}).done());
  auto moved = promise.future().then([own = std::make_unique<int>(5)](Future<int> f) { return *own + f.get(); });
  EXPECT_EQ(moved.get(), 15);
}

TEST(RpcFuture, CancelEndsItAndSkipsWhatWasToCome) {
  Promise<int> promise;
  bool ran = false;
  auto then = promise.future().then([&](Future<int>) { ran = true; });
  EXPECT_TRUE(then.cancel());
  EXPECT_FALSE(then.cancel());
  EXPECT_FALSE(promise.cancelled());
  EXPECT_TRUE(promise.future().cancel());
  EXPECT_TRUE(promise.cancelled());
  EXPECT_FALSE(promise.try_set_value(3));
  EXPECT_THROW(then.get(), Aborted);
  EXPECT_FALSE(ran);
}

TEST(RpcFuture, AllAndAny) {
  Promise<int> a, b;
  auto all = when_all(std::vector{a.future(), b.future()});
  auto any = when_any(std::vector{a.future(), b.future()});
  auto both = when_all(a.future(), b.future(), make_ready_future(std::string("x")), make_ready_future());
  b.try_set_value(2);
  EXPECT_FALSE(all.done());
  EXPECT_EQ(any.get(), 1u);
  a.try_set_value(1);
  EXPECT_EQ(all.get(), (std::vector{1, 2}));
  EXPECT_EQ(both.get(), (std::tuple(1, 2, std::string("x"), std::monostate())));
  EXPECT_EQ(when_all(std::vector<Future<int>>()).get().size(), 0u);
  when_all(std::vector{make_ready_future(), make_ready_future()}).get();
  EXPECT_THROW(when_any(std::vector<Future<int>>()), InvalidArgument);
  std::vector<Future<std::unique_ptr<int>>> owners;
  owners.push_back(make_ready_future(std::make_unique<int>(3)));
  EXPECT_EQ(*when_all(owners).state().value()[0], 3);
}

TEST(RpcFuture, TheFirstErrorOfAllComesAtOnce) {
  Promise<int> a, b;
  auto all = when_all(std::vector{a.future(), b.future()});
  b.try_set_error(problem("b"));
  EXPECT_TRUE(all.done());
  EXPECT_THROW(all.get(), std::runtime_error);
  a.try_set_value(1);
  EXPECT_EQ(when_any(std::vector{b.future()}).get(), 0u);
}

TEST(RpcFuture, ALongChainNeedsNoStack) {
  Promise<int> promise;
  auto future = promise.future();
  const int length = 200'000;
  for (int i = 0; i < length; ++i) future = future.then([](Future<int> f) { return f.get() + 1; });
  promise.try_set_value(0);
  EXPECT_EQ(future.get(), length);
}

TEST(RpcFuture, AContinuationMayWaitForWhatIsDueInItsThread) {
  Promise<int> first, second;
  auto later = second.future().then([](Future<int> f) { return f.get() + 1; });
  auto result = first.future().then([&](Future<int> f) {
    second.try_set_value(f.get());  // makes `later` due: it runs after this continuation, or when this one waits
    return later.get();
  });
  first.try_set_value(4);
  EXPECT_EQ(result.get(), 5);
}

TEST(RpcFutureRace, OnlyOneCompletesItAndAllHearTheSame) {
  const int rounds = kSanitized ? 300 : test::full_run() ? 3000 : 600;
  for (int round = 0; round < rounds; ++round) {
    Promise<int> promise;
    std::atomic<int> won{0}, ran{0}, ready{0};
    std::vector<std::jthread> threads;
    const auto at_once = [&](auto work) {
      threads.emplace_back([&, work] {
        ++ready;
        while (ready < 6) std::this_thread::yield();
        work();
      });
    };
    const auto future = promise.future();
    at_once([&] { won += promise.try_set_value(1); });
    at_once([&] { won += promise.try_set_error(problem("lost")); });
    at_once([&] { won += future.cancel(); });
    at_once([&] { future.wait(); });
    at_once([&] { future.then([&](Future<int> f) { ran += f.done(); }); });
    at_once([&] {
      while (!future.wait_for(10us)) continue;
    });
    threads.clear();
    EXPECT_EQ(won, 1);
    EXPECT_EQ(ran, 1);
    EXPECT_TRUE(future.done());
  }
}

TEST(RpcFutureRace, SleepersAreWoken) {
  for (int round = 0; round < (kSanitized ? 100 : 1000); ++round) {
    Promise<std::vector<int>> promise;
    std::vector<std::jthread> threads;
    std::atomic<int> sum{0};
    for (int i = 0; i < 4; ++i) threads.emplace_back([&, future = promise.future()] { sum += future.get()[0]; });
    if (round % 2) std::this_thread::yield();
    promise.try_set_value(std::vector<int>{2});
    threads.clear();
    EXPECT_EQ(sum, 8);
  }
}

TEST(RpcFutureRace, AllAndAnyOfManyThreads) {
  for (int round = 0; round < (kSanitized ? 50 : 500); ++round) {
    std::vector<Promise<int>> promises(8);
    std::vector<Future<int>> futures;
    for (auto& promise : promises) futures.push_back(promise.future());
    auto all = when_all(futures);
    auto any = when_any(futures);
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        for (int i = t; i < 8; i += 4) promises[static_cast<size_t>(i)].try_set_value(i);
      });
    EXPECT_LT(any.get(), 8u);
    EXPECT_EQ(all.get(), (std::vector{0, 1, 2, 3, 4, 5, 6, 7}));
  }
}

// Takes the place of an agent: the thread that waits does the work itself.
class Driven : public Waits {
 public:
  bool wait(detail::FutureState& state, Deadline deadline) override {
    ++waited;
    while (!state.done() && !deadline.passed() && step()) continue;
    return state.done();
  }
  void run(std::function<void()> continuation) override { due.push_back(std::move(continuation)); }
  void cancel(detail::FutureState& state) override { cancelled = &state; }

  bool step() {
    if (!due.empty()) {
      auto next = std::move(due.front());
      due.erase(due.begin());
      next();
      return true;
    }
    if (answers.empty()) return false;
    auto next = std::move(answers.front());
    answers.erase(answers.begin());
    next();
    return true;
  }
  std::vector<std::function<void()>> due, answers;
  detail::FutureState* cancelled = nullptr;
  int waited = 0;
};

TEST(RpcFuture, WhoeverWaitsDrivesTheAgentAlsoForFuturesMadeOfOthers) {
  Driven agent;
  Promise<int> a(&agent), b(&agent);
  agent.answers = {[&] { a.try_set_value(1); }, [&] { b.try_set_value(2); }};
  auto sum = when_all(a.future(), b.future()).then([](Future<std::tuple<int, int>> f) {
    const auto [x, y] = f.get();
    return x + y;
  });
  EXPECT_FALSE(sum.done());
  EXPECT_EQ(sum.get(), 3);
  EXPECT_EQ(agent.waited, 1);
  Promise<int> c(&agent);
  EXPECT_FALSE(c.future().wait_for(1ms));
  EXPECT_TRUE(c.future().cancel());
  EXPECT_EQ(agent.cancelled, &c.future().state());
}

TEST(RpcFuture, AThreadOfAnAgentDrivesItForAnyFuture) {
  Driven agent;
  Promise<int> nobodys, late;
  agent.answers = {[&] { nobodys.try_set_value(1); }};
  {
    const detail::WaitsOfThread waits(&agent);
    EXPECT_EQ(nobodys.future().get(), 1);
  }
  EXPECT_FALSE(late.future().wait_for(1ms));
  EXPECT_EQ(agent.waited, 1);
}

}  // namespace
}  // namespace muster::rpc
