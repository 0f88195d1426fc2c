// The order of a group's collectives: which thread runs them, and how long a thread waits for its turn.

#include "comm/kit/collective_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "muster/base/error.h"
#include "support/held_queue.h"
#include "support/patience.h"

namespace muster::test {
namespace {

using comm::CollectiveQueue;

TEST(CollectiveQueue, AWaitEndsByItsDeadlineWhateverTheJobDoes) {
  CollectiveQueue queue("test");
  HeldQueue held(queue);
  queue.drive([] { return false; }, Deadline::after(std::chrono::milliseconds(1)));
  EXPECT_FALSE(queue.try_take()) << "the job still runs";
  held.release();
  bool over = false;
  queue.run([&](bool) { over = true; });
  EXPECT_TRUE(over);
}

TEST(CollectiveQueue, JobsRunInTheirOrderAndOnTheThreadThatWaits) {
  CollectiveQueue queue("test");
  std::vector<int> order;
  HeldQueue held(queue, [&] { order.push_back(0); });
  std::atomic<bool> done{false};  // drive() reads it while the progress thread may run the job that sets it
  for (int i = 1; i <= 3; ++i)
    queue.submit([&, i](bool) {
      order.push_back(i);
      done = i == 3;
      return false;
    });
  held.release();
  queue.drive([&] { return done.load(); });
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3}));
}

TEST(CollectiveQueue, WhoeverWaitsForItsTurnUntilItsDeadlineSaysSoOnce) {
  CollectiveQueue queue("test");
  HeldQueue held(queue);
  int late = 0;
  bool ran = false;
  queue.run([&](bool) { ran = true; }, Deadline::after(std::chrono::milliseconds(1)),
            [&] {
              ++late;
              EXPECT_FALSE(ran);
              held.release();
            });
  EXPECT_TRUE(ran);
  EXPECT_EQ(late, 1);
  queue.run([](bool) {}, Deadline::after(patience().left()), [&] { ++late; });
  EXPECT_EQ(late, 1);
}

// The job before it does not end, whatever late() does.
TEST(CollectiveQueue, AJobWhoseTurnNeverComesIsTakenBack) {
  CollectiveQueue queue("test");
  HeldQueue held(queue);
  int late = 0;
  bool ran = false;
  std::string message;
  try {
    queue.run([&](bool) { ran = true; }, Deadline::after(std::chrono::milliseconds(1)), [&] { ++late; },
              /*slack=*/std::chrono::milliseconds(1));
  } catch (const TimeoutError& error) {
    message = error.what();
  }
  EXPECT_NE(message.find("has not ended, 0 s after this one's deadline"), std::string::npos) << message;
  EXPECT_EQ(late, 1);
  held.release();
  bool over = false;
  queue.run([&](bool) { over = true; });
  EXPECT_TRUE(over);
  EXPECT_FALSE(ran);
}

// A job's continuation may use the queue, while another thread of the queue runs what is queued.
TEST(CollectiveQueue, WhatComesAfterAJobMayWaitForAnother) {
  CollectiveQueue queue("test");
  std::promise<std::string> result;
  queue.submit([](bool) { return true; },
               [&] {
                 std::promise<void> second;
                 queue.submit([&](bool) {
                   second.set_value();
                   return false;
                 });
                 const auto ran = second.get_future().wait_until(patience().when());
                 result.set_value(ran == std::future_status::ready ? "ran" : "stuck");
               });
  EXPECT_EQ(result.get_future().get(), "ran");
}

// Its owner has left: the job fails, before submit() returns, and no thread keeps a reference to the owner.
TEST(CollectiveQueue, AfterTheStopAJobRunsWhereItIsSubmitted) {
  CollectiveQueue queue("test");
  queue.stop();
  const auto here = std::this_thread::get_id();
  std::vector<std::thread::id> ran, after;
  for (int i = 0; i < 2; ++i)
    queue.submit(
        [&](bool) {
          ran.push_back(std::this_thread::get_id());
          return true;
        },
        [&] { after.push_back(std::this_thread::get_id()); });
  EXPECT_EQ(ran, (std::vector{here, here}));
  EXPECT_EQ(after, (std::vector{here, here}));
  queue.run([&](bool) { ran.clear(); });
  EXPECT_TRUE(ran.empty());
}

// A callback may release the last reference to the queue's owner, which stops the queue.
TEST(CollectiveQueue, StopsInWhatComesAfterAJobAndOutlivesItsOwner) {
  auto queue = std::make_shared<CollectiveQueue>("test");
  std::promise<void> began, stopped;
  std::atomic<int> ran{0};
  queue->submit([](bool) { return true; },
                [&] {
                  began.get_future().wait();
                  queue->stop();
                  queue.reset();
                  stopped.set_value();
                });
  queue->submit([&](bool) {
    ++ran;
    return false;
  });
  began.set_value();
  stopped.get_future().wait();
  EXPECT_EQ(ran, 1) << "stop() was to wait for the queued job";
}

}  // namespace
}  // namespace muster::test
