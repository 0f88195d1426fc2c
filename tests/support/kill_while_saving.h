// The end of a training of two ranks that saves again and again: one of them is killed at some moment of a save.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <random>

#include "support/forked.h"
#include "support/patience.h"

namespace muster::test {

// Kills the rank `struck` when two more steps have been saved than were restored (-1: not yet), and waits for the other
// one, which returns "lost".
inline void kill_while_saving(ForkedRanks& ranks, int struck, const std::atomic<int64_t>& restored,
                              const std::atomic<int64_t>& saved, std::mt19937& random) {
  for (const auto deadline = patience(); restored < 0 || saved < restored + 2; ::usleep(1000))
    ASSERT_FALSE(deadline.passed());
  ::usleep(random() % 20'000);  // so that the kill may come at any moment of a save
  ranks.signal(struck, SIGKILL);
  const auto ends = ranks.wait_all(patience());
  EXPECT_EQ(ends[static_cast<size_t>(struck)].signal, SIGKILL);
  EXPECT_EQ(ends[static_cast<size_t>(1 - struck)].said, "lost");
}

}  // namespace muster::test
