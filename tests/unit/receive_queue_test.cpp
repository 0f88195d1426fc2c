// Receives from any source: who looks while callbacks run.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>

#include "comm/backends/hierarchical/receive_queue.h"
#include "support/patience.h"

namespace muster::test::receive_queue {
namespace {

using comm::hierarchical_backend::ReceiveQueue;
using Turn = ReceiveQueue::Turn;
using std::chrono::milliseconds;

bool comes(std::future<void> future) { return future.wait_until(patience().when()) == std::future_status::ready; }

// What ends it; until then it waits.
ReceiveQueue::Attempt until(const std::atomic<bool>& over, std::function<void(Turn)> then) {
  return [&over, then = std::move(then)](Turn turn) -> ReceiveQueue::Outcome {
    if (turn == Turn::kFirst && !over) return {};
    return {.over = true, .then = [then, turn] { then(turn); }};
  };
}

TEST(ReceiveQueue, ReceivesThatAreLateEndOneAfterAnother) {
  ReceiveQueue queue([] { return nullptr; });
  std::atomic<bool> first_is_over = false;
  std::promise<void> a_began, a_may_end, b_ended, first_ended;
  queue.add(1, Deadline::never(), until(first_is_over, [&](Turn) { first_ended.set_value(); }));
  const Deadline soon = Deadline::after(milliseconds(5));
  queue.add(1, soon, until(first_is_over, [&](Turn turn) {
              EXPECT_EQ(turn, Turn::kLate);
              a_began.set_value();
              a_may_end.get_future().wait();
            }));
  queue.add(1, soon, until(first_is_over, [&](Turn turn) {
              EXPECT_EQ(turn, Turn::kLate);
              b_ended.set_value();
            }));
  EXPECT_TRUE(comes(a_began.get_future()));
  EXPECT_TRUE(comes(b_ended.get_future())) << "it waits for the callback of another";
  first_is_over = true;
  EXPECT_TRUE(comes(first_ended.get_future()));
  a_may_end.set_value();
}

TEST(ReceiveQueue, ACallbackMayReceiveAndStop) {
  std::atomic<bool> first = false, second = false, third = false;
  std::promise<void> nested, stopped;
  const auto owner = std::make_shared<std::weak_ptr<ReceiveQueue>>();
  const auto queue = std::make_shared<ReceiveQueue>([owner] { return owner->lock(); });
  *owner = queue;  // the thread that stops the queue needs it for longer than this test
  queue->add(1, Deadline::never(), until(first, [&](Turn) {
               std::promise<void> inner;
               queue->add(1, Deadline::never(), until(second, [&](Turn) { inner.set_value(); }));
               second = true;
               EXPECT_TRUE(comes(inner.get_future()));  // another thread looks
               nested.set_value();
             }));
  first = true;
  EXPECT_TRUE(comes(nested.get_future()));
  queue->add(2, Deadline::never(), until(third, [&](Turn) {
               queue->stop();
               stopped.set_value();
             }));
  third = true;
  EXPECT_TRUE(comes(stopped.get_future()));
  queue->stop();
}

TEST(ReceiveQueue, WhatComesAfterTheStopEndsImmediately) {
  ReceiveQueue queue([] { return nullptr; });
  queue.stop();
  const std::atomic<bool> never = false;
  std::optional<Turn> ended;
  queue.add(1, Deadline::never(), until(never, [&](Turn turn) { ended = turn; }));
  EXPECT_EQ(ended, Turn::kStop);
}

}  // namespace
}  // namespace muster::test::receive_queue
