// Heartbeats of a thread that is busy.
#include "transport/heart.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>

#include "support/eventually.h"

namespace muster::transport {
namespace {

using std::chrono::milliseconds;
using test::eventually;

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

TEST(HeartTest, IsStillWhenATurnNeverEndsAndBeatsInTheNext) {
  Turns turns, busy;
  std::atomic<int> beats{0}, looks{0};
  const Heart heart(turns, milliseconds(1), milliseconds(20), [&] { ++beats; });
  const Heart other(busy, milliseconds(1), kLongestTurn, [&] { ++looks; });
  const auto beats_in = [&](int of_other) {
    const int before = beats, end = looks + of_other;
    EXPECT_TRUE(eventually([&] { return looks >= end; }));
    return beats > before;
  };
  const auto beats_in_a_new_turn = [&] {
    turns.another();
    return beats_in(10);
  };
  EXPECT_TRUE(eventually(beats_in_a_new_turn));
  EXPECT_TRUE(eventually([&] { return !beats_in(50); }));
  EXPECT_TRUE(eventually(beats_in_a_new_turn));
}

}  // namespace
}  // namespace muster::transport
