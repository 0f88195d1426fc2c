// The contract of every collective of every backend: operation x dtype x reduce operation x number of ranks x size x
// kind of tensor, blocking and asynchronous, against the reference of support/patterns.h, to the bit.

#include <algorithm>
#include <cctype>
#include <set>
#include <string>
#include <string_view>

#include "comm/backends/shm/layout.h"
#include "support/collective_cases.h"
#include "support/full_run.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

constexpr int kMostRanks = 5;

// Sizes in elements: zero, small, odd, and sizes on both sides of every border between two ways through memory.
std::vector<int64_t> sizes(int64_t item, int ranks) {
  const comm::shm_backend::Layout layout(ranks);
  const auto slot = static_cast<int64_t>(comm::shm_backend::kSlotPayload);
  std::set<int64_t> counts = {0, 1, 2, 3, 5, 101, 12345};
  for (const int64_t bytes : {int64_t{32}, slot / ranks, slot, static_cast<int64_t>(layout.early)})
    for (const int64_t beside : {-1, 0, 1})
      if (beside == 1 || !kSanitized) counts.insert(bytes / item + beside);
  return {counts.begin(), counts.end()};
}

// Sizes in turns of the pipeline: a little less than one, a little more than one, more than there are buffers.
std::vector<int64_t> large_sizes(int64_t item, int ranks, bool slices) {
  const comm::shm_backend::Layout layout(ranks);
  const auto turn = static_cast<int64_t>(slices ? layout.chunk : layout.turn_bytes()) / item;
  const auto buffers = static_cast<int64_t>(comm::shm_backend::kTurnBuffers);
  return {turn - 1, turn, turn + 1, buffers * turn, (buffers + 1) * turn + 1, (2 * buffers + 3) * turn + 77};
}

class Collectives : public CommContract {
 protected:
  // Unless all tests run, only shm has the whole grid, because the sizes are at the borders between its ways through
  // memory, with an even and an odd number of ranks. The other backends have a few sizes of the common dtypes.
  bool thin() const { return GetParam().backend != "shm" && !full_run(); }
  std::vector<int> numbers_of_ranks() const {
    if (full_run()) return {1, 2, 3, 4, kMostRanks};
    if (thin()) return {2, 3};
    return as_threads() ? std::vector{1, 3, 4} : std::vector{2, kMostRanks};
  }

  void grid(std::string_view name) const {
    const Collective& subject = collective(name);
    const auto& types = subject.reduces ? reducible_types() : movable_types();
    for (const int n : numbers_of_ranks())
      run(n, [&](World& world) {
        int64_t number = 0;  // the same on all ranks
        const auto check = [&](at::ScalarType dtype, ReduceOp op, int64_t count) {
          ++number;
          const Case c{.world = world,
                       .group = world.group(),
                       .dtype = dtype,
                       .op = op,
                       .count = count,
                       .kind = kKinds[static_cast<size_t>(number) % std::size(kKinds)],
                       .root = static_cast<int>(number % n),
                       .async = number % 2 == 1,
                       .shift = number * 17};
          SCOPED_TRACE(testing::Message() << name << " #" << number << ", " << c);
          subject.start(c)();
        };
        int64_t pair = n;
        for (const auto dtype : types)
          for (const auto op : subject.reduces ? ops_of(dtype) : std::vector{ReduceOp::SUM}) {
            const auto item = static_cast<int64_t>(c10::elementSize(dtype));
            // The kinds of tensor take turns, so that each meets each size and dtype sooner or later. The common dtypes
            // are tested with every size. With the other dtypes the sizes take turns, too, because the arithmetic of
            // each dtype has its own tests (comm_values_test).
            const bool common = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kLong;
            if (thin()) {
              if (common)
                for (const int64_t count : {0, 1, 101, 70'001}) check(dtype, op, count);
              continue;
            }
            int64_t turn = pair;
            for (const int64_t count : sizes(item, n))
              if (common || ++turn % 4 == 0) check(dtype, op, count);
            // Large sizes take turns among dtypes and operations.
            if (++pair % (kSanitized || subject.reduces ? 6 : 3) == 0)
              for (const int64_t count : large_sizes(item, n, subject.slices)) check(dtype, op, count);
            if (testing::Test::HasFailure()) return;  // a few failures are enough
          }
      });
  }
};
MUSTER_COMM_CONTRACT(Collectives);

TEST_P(Collectives, AllReduce) { grid("all_reduce"); }
TEST_P(Collectives, Reduce) { grid("reduce"); }
TEST_P(Collectives, Broadcast) { grid("broadcast"); }
TEST_P(Collectives, AllGather) { grid("all_gather"); }
TEST_P(Collectives, AllGatherIntoTensor) { grid("all_gather_into_tensor"); }
TEST_P(Collectives, ReduceScatter) { grid("reduce_scatter"); }
TEST_P(Collectives, ReduceScatterTensor) { grid("reduce_scatter_tensor"); }
TEST_P(Collectives, Gather) { grid("gather"); }
TEST_P(Collectives, Scatter) { grid("scatter"); }
TEST_P(Collectives, AllToAllSingle) { grid("all_to_all_single"); }
TEST_P(Collectives, AllToAllSingleWithSplits) { grid("all_to_all_single with splits"); }
TEST_P(Collectives, SendAndRecv) { grid("send and recv"); }
TEST_P(Collectives, Scan) { grid("scan"); }

// Whoever adds a collective to collective_cases.cpp must name it above.
TEST(CollectiveCases, EachHasAGrid) {
  std::set<std::string> tests;
  const auto& all = *testing::UnitTest::GetInstance();
  for (int suite = 0; suite < all.total_test_suite_count(); ++suite)
    if (const auto& one = *all.GetTestSuite(suite); std::string_view(one.name()) == "Comm/Collectives")
      for (int i = 0; i < one.total_test_count(); ++i) {
        const std::string name = one.GetTestInfo(i)->name();
        tests.insert(name.substr(0, name.find('/')));
      }
  for (const Collective& each : collectives()) {
    std::string name;  // "all_to_all_single with splits" is AllToAllSingleWithSplits
    bool begins = true;
    for (const char letter : std::string_view(each.name)) {
      if (letter != '_' && letter != ' ') name += begins ? static_cast<char>(std::toupper(letter)) : letter;
      begins = letter == '_' || letter == ' ';
    }
    EXPECT_TRUE(tests.contains(name)) << name;
  }
}

// No rank goes on before all have come.
TEST_P(Collectives, Barrier) {
  for (int n = 1; n <= kMostRanks; ++n)
    run(n, [](World& world) {
      for (int i = 1; i <= 50; ++i) {
        world.store().add("came", 1);
        if (i % 2)
          barrier();
        else
          barrier_async().wait();
        ASSERT_GE(world.store().add("came", 0), int64_t{i} * world.world_size());
      }
    });
}

// The same elements give the same bits, wherever they lie and whatever surrounds them.
TEST_P(Collectives, BitsDependNeitherOnSizeNorOnPath) {
  run(3, [](World& world) {
    constexpr int64_t kMany = 700'001;
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor all = tile(table_of(dtype, world.rank()), 0, kMany);
      const TestTensor whole(world, world.rank(), Kind::kOrdinary, all);
      all_reduce(whole);
      for (const int64_t count : {int64_t{7}, int64_t{3000}, int64_t{60'000}})
        for (const auto kind : kKinds) {
          const int64_t begin = kMany - count - 11;
          const TestTensor part(world, world.rank(), kind, all.narrow(0, begin, count).clone());
          all_reduce(part);
          ASSERT_EQ(difference(part, whole->narrow(0, begin, count)), "") << to_string(kind) << ", " << count;
        }
    }
  });
}

// Many operations of all collectives are under way at the same time, and are waited for in another order than they were
// issued.
TEST_P(Collectives, ManyInFlight) {
  for (const int n : {2, 4})
    run(n, [](World& world) {
      for (int round = 0; round < (kSanitized ? 2 : 8); ++round) {
        std::vector<Finish> under_way;
        int64_t number = round;
        for (const int64_t count : {1, 700, 9001, 90'000})
          for (const auto& subject : collectives())
            under_way.push_back(subject.start({.world = world,
                                               .group = world.group(),
                                               .dtype = number % 2 ? at::kFloat : at::kInt,
                                               .count = count,
                                               .kind = kKinds[static_cast<size_t>(number) % std::size(kKinds)],
                                               .root = static_cast<int>(number % world.world_size()),
                                               .async = number % 5 != 0,  // a blocking one waits for its turn
                                               .shift = ++number * 31}));
        if (world.rank() % 2) std::reverse(under_way.begin(), under_way.end());
        for (const auto& finish : under_way) finish();
        ASSERT_FALSE(testing::Test::HasFailure());
      }
    });
}

TEST_P(Collectives, WorkTellsWhetherItIsComplete) {
  run(2, [](World& world) {
    EXPECT_TRUE(Work().is_completed());
    Work().wait();
    const TestTensor t(world, world.rank(), Kind::kOrdinary, tile(table_of(at::kFloat, world.rank()), 0, 10));
    if (world.rank() == 0) {
      Work work = all_reduce_async(t);
      EXPECT_FALSE(work.is_completed());
      EXPECT_FALSE(work.wait_for(std::chrono::milliseconds(0)));
      EXPECT_FALSE(work.wait_for(std::chrono::milliseconds(20)));
      world.store().set("go", "1");
      EXPECT_TRUE(work.wait_for(kPatience));
      EXPECT_TRUE(work.is_completed());
      work.wait();
      EXPECT_EQ(work.source_rank(), -1);
    } else {
      world.store().get("go", patience());
      all_reduce(t);
    }
    EXPECT_EQ(difference(t, reduced_table(at::kFloat, ReduceOp::SUM, 2), 0), "");
  });
}

// Dropping a Work neither cancels nor waits, and the operation keeps its tensors.
TEST_P(Collectives, DroppedWorkGoesOn) {
  run(3, [](World& world) {
    std::vector<at::Tensor> results;
    for (int i = 0; i < 20; ++i) {
      const TestTensor t(world, world.rank(), Kind::kHeap, tile(table_of(at::kDouble, world.rank()), i, 5000));
      all_reduce_async(t);
      if (i % 2) results.push_back(*t);
    }
    barrier();
    for (size_t i = 0; i < results.size(); ++i)
      EXPECT_EQ(difference(results[i], reduced_table(at::kDouble, ReduceOp::SUM, 3), static_cast<int64_t>(2 * i + 1)),
                "");
  });
}

}  // namespace
}  // namespace muster::test
