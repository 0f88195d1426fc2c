// How ranks are spread over cores, on machines of every shape.
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <set>

#include "base/text.h"
#include "launch/ranks/placement.h"
#include "launch/ranks/topology.h"
#include "shm/spin.h"

namespace muster::launch {
namespace {

// Packages of so many cores; each core has `threads` processors, numbered as in the kernel: first the first threads of
// all cores.
std::vector<Core> machine(const std::vector<int>& packages, int threads = 1) {
  std::vector<Core> cores;
  int total = 0, next = 0;
  for (const int size : packages) total += size;
  for (size_t package = 0; package < packages.size(); ++package)
    for (int i = 0; i < packages[package]; ++i, ++next) {
      Core core{.package = static_cast<int>(package)};
      for (int thread = 0; thread < threads; ++thread) core.processors.push_back(next + thread * total);
      cores.push_back(core);
    }
  return cores;
}

std::string words(const std::vector<RankPlacement>& placement) {
  std::vector<std::string> ranks;
  for (const auto& rank : placement) ranks.push_back(name_of(rank.processors));
  return join(ranks, " | ");
}

TEST(Placement, RanksGetBlocksOfNeighbours) {
  EXPECT_EQ(words(spread(machine({2}), 2)), "0 | 1");
  EXPECT_EQ(words(spread(machine({8}), 2)), "0-3 | 4-7");
  EXPECT_EQ(words(spread(machine({5}), 2)), "0-2 | 3, 4");
  EXPECT_EQ(words(spread(machine({4}, 2), 2)), "0, 1, 4, 5 | 2, 3, 6, 7") << "hyper-threads go with their core";
  EXPECT_EQ(spread(machine({4}, 2), 2)[0].cores, 2);
}

TEST(Placement, NoRankStraddlesPackages) {
  EXPECT_EQ(words(spread(machine({3, 3}), 4)), "0, 1 | 2 | 3, 4 | 5");
  EXPECT_EQ(words(spread(machine({4, 4}), 2)), "0-3 | 4-7");
  EXPECT_EQ(words(spread(machine({4, 4}), 3)), "0, 1 | 2, 3 | 4-7");
  EXPECT_EQ(words(spread(machine({6, 2}), 4)), "0, 1 | 2, 3 | 4, 5 | 6, 7") << "in proportion to the cores";
  EXPECT_EQ(words(spread(machine({5, 5, 1}), 4)), "0-2 | 3, 4 | 5-7 | 8, 9") << "a rank on one core would slow all";
  EXPECT_EQ(words(spread(machine({1, 7}), 8)), "0 | 1 | 2 | 3 | 4 | 5 | 6 | 7");
}

TEST(Placement, FewRanksGetWholePackages) {
  EXPECT_EQ(words(spread(machine({2, 2, 2, 2}), 2)), "0-3 | 4-7");
  EXPECT_EQ(words(spread(machine({2, 2, 2}), 1)), "0-5");
}

TEST(Placement, MoreRanksThanCoresAreNotPinned) {
  EXPECT_TRUE(spread(machine({2}), 3).empty());
  EXPECT_TRUE(spread({}, 1).empty());
  EXPECT_TRUE(spread(machine({2}), 0).empty());
}

TEST(Placement, EveryShapeGivesEachRankCoresOfItsOwn) {
  for (int a = 1; a <= 5; ++a)
    for (int b = 0; b <= 5; ++b)
      for (int c = 0; c <= 3; ++c) {
        std::vector<int> packages{a};
        for (const int size : {b, c})
          if (size > 0) packages.push_back(size);
        const auto cores = machine(packages, 2);
        for (int ranks = 1; ranks <= static_cast<int>(cores.size()); ++ranks) {
          SCOPED_TRACE(text(a, ' ', b, ' ', c, ", ", ranks, " ranks"));
          std::set<int> used;
          const auto placement = spread(cores, ranks);
          ASSERT_EQ(placement.size(), static_cast<size_t>(ranks));
          for (const auto& rank : placement) {
            EXPECT_GE(rank.cores, 1);
            EXPECT_EQ(rank.processors.size(), static_cast<size_t>(rank.cores) * 2);
            for (const int processor : rank.processors) EXPECT_TRUE(used.insert(processor).second) << "used twice";
          }
          if (std::set<int>(packages.begin(), packages.end()).size() == 1) {
            EXPECT_EQ(used.size(), cores.size() * 2) << "all are used";
          }
        }
      }
}

TEST(Placement, OnlyAllowedProcessorsCount) {
  const auto cores = only(machine({2, 2}, 2), {1, 2, 5});  // core 1 completely, and one thread of core 2
  ASSERT_EQ(cores.size(), 2u);
  EXPECT_EQ(words(spread(cores, 2)), "1, 5 | 2");
  EXPECT_TRUE(only(machine({2}), {}).empty());
}

TEST(Placement, MasksHaveTheirBits) {
  EXPECT_TRUE(mask_of({}).empty());
  EXPECT_EQ(mask_of({0, 2, 64, 1023}).size(), 1024 / (8 * sizeof(unsigned long)));
  EXPECT_EQ(mask_of({0, 2, 64})[0], 5u);
}

TEST(Placement, TheMachineHasTheCoresThatHwlocIsTold) {
  ::setenv("HWLOC_SYNTHETIC", "pack:2 core:3 pu:2", 1);
  const auto cores = cores_of_machine();
  ::unsetenv("HWLOC_SYNTHETIC");
  if (cores.empty()) GTEST_SKIP() << "hwloc is not here: apt-get install libhwloc15";
  ASSERT_EQ(cores.size(), 6u);
  EXPECT_EQ(cores[2].package, 0);
  EXPECT_EQ(cores[3].package, 1);
  EXPECT_EQ(cores[3].processors, (std::vector<int>{6, 7}));
}

TEST(Placement, AClaimedCoreIsNobodyElses) {
  const Core core{.processors = {65000}};  // a processor that no machine has
  UniqueFd held = claim(core);
  ASSERT_TRUE(held);
  EXPECT_FALSE(claim(core));
  held.reset();
  EXPECT_TRUE(claim(core));
}

}  // namespace
}  // namespace muster::launch
