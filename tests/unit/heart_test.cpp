// Heartbeats of a thread that is busy.
#include "transport/heart.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "muster/base/deadline.h"
#include "support/patience.h"

namespace muster::transport {
namespace {

using std::chrono::milliseconds;

template <typename Condition>
bool eventually(const Condition& condition) {
  for (const auto deadline = test::patience(); !deadline.passed(); std::this_thread::yield())
    if (condition()) return true;
  return false;
}

TEST(HeartTest, BeatsWhileOneTurnLasts) {
  Turns turns;  // in the first
  std::atomic<int> beats{0};
  const Heart heart(turns, milliseconds(1), kLongestTurn, [&] { ++beats; });
  EXPECT_TRUE(eventually([&] { return beats >= 3; }));
}

// Fifty looks of another heart are enough for many of this one. Only a look that began before the rest may still beat.
TEST(HeartTest, IsStillOtherwise) {
  Turns turns;
  std::atomic<int> beats{0};
  const Heart heart(turns, milliseconds(1), kLongestTurn, [&] { ++beats; });
  ASSERT_TRUE(eventually([&] { return beats > 0; }));
  {
    const Turns::Rest rest(turns);
    Turns busy;
    std::atomic<int> others{0};
    const Heart other(busy, milliseconds(1), kLongestTurn, [&] { ++others; });
    const int before = beats;
    ASSERT_TRUE(eventually([&] { return others >= 50; }));
    EXPECT_LE(beats, before + 1);
  }
  ASSERT_TRUE(eventually([&, before = beats.load()] { return beats > before; })) << "the next turn lasts, too";
}

TEST(HeartTest, IsStillWhenATurnNeverEnds) {
  Turns turns;
  std::atomic<int> beats{0}, others{0};
  const Heart heart(turns, milliseconds(1), milliseconds(0), [&] { ++beats; });
  Turns busy;
  const Heart other(busy, milliseconds(1), kLongestTurn, [&] { ++others; });
  ASSERT_TRUE(eventually([&] { return others >= 50; }));
  EXPECT_EQ(beats, 0);
}

}  // namespace
}  // namespace muster::transport
