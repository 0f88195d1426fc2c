// Who comes last to the operations of several hosts: the rank, or its host, is named on all.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "base/text.h"
#include "contract/comm_hosts_fixture.h"
#include "multiprocess/launch_support.h"
#include "muster/comm/collectives.h"
#include "support/forked.h"

namespace muster::test::faked_hosts {
namespace {

// In operations 0 to `times` - 1, rank `rank_of(i)` comes `delay` late to operation i.
FaultPlan delays(int times, std::chrono::milliseconds delay, const std::function<std::vector<int>(int)>& ranks_of) {
  FaultPlan plan;
  for (int i = 0; i < times; ++i)
    for (const int rank : ranks_of(i))
      plan.add({.action = FaultAction::kDelay, .rank = rank, .operation = static_cast<uint64_t>(i), .delay = delay});
  return plan;
}

// `times` collectives of all kinds: with and without a reduction in each host first, and with parts of unequal sizes
// between hosts.
void collectives_of_all_kinds(int times, int ranks) {
  for (int i = 0; i < times; ++i) {
    if (i % 4 == 0) all_reduce_async(at::ones({10'000})).wait();
    if (i % 4 == 1) barrier();
    if (i % 4 == 2) all_gather_into_tensor(at::zeros({ranks * 500}), at::ones({500}));
    if (i % 4 == 3) all_to_all_single(at::zeros({ranks}), at::ones({ranks}));
  }
}

constexpr int kTimes = 26;
constexpr milliseconds kLate{50};

void expect_straggler(World& world, int victim, int told) {
  const auto ranks = world.group().stragglers();
  ASSERT_EQ(ranks.size(), static_cast<size_t>(world.world_size()));
  uint64_t all = 0;
  for (const auto& rank : ranks) all += rank.times_last;
  EXPECT_EQ(all, static_cast<uint64_t>(told));
  const auto& late = ranks[static_cast<size_t>(victim)];
  EXPECT_GE(late.times_last, static_cast<uint64_t>(kTimes * 3 / 4));
  EXPECT_GE(late.late, kLate * kTimes * 3 / 4);
  EXPECT_LE(late.late, seconds(60));
  EXPECT_CONTAINS(world.group().straggler_report(), text("rank ", victim, " came last to "));
}

struct Late {
  Hosts hosts;
  int victim;
  // The number of collectives that are counted: between hosts, all but the last, which no other follows.
  int told = kTimes - 1;
};

// Victims that are not a leader, a leader, of the first host, and alone on their host; and ranks of one host that use
// this backend explicitly.
const std::vector<Late> kLateRanks = {{{"a", "a", "b", "b"}, 3},   {{"a", "a", "b", "b"}, 2}, {{"a", "a", "b", "b"}, 1},
                                      {{"a", "b", "b", "c"}, 3},   {{"a", "b", "c", "b"}, 3}, {{"a", "b"}, 1},
                                      {{"a", "a", "a"}, 2, kTimes}};

TEST(Hosts, TheRankThatComesLastIsNamedOnAll) {
  for (const auto& [hosts, victim, told] : kLateRanks) {
    SCOPED_TRACE(testing::Message() << join(hosts) << ", rank " << victim);
    const auto options =
        options_of("hierarchical", delays(kTimes, kLate, [victim = victim](int) { return std::vector<int>{victim}; }));
    testing::internal::CaptureStderr();
    run_on(
        hosts,
        [victim = victim, told = told](World& world) {
          EXPECT_EQ(world.group().straggler_report(), "");
          collectives_of_all_kinds(kTimes, world.world_size());
          expect_straggler(world, victim, told);
        },
        options);
    EXPECT_CONTAINS(testing::internal::GetCapturedStderr(), text("rank ", victim, " came last to "));
  }
}

TEST(HostsLateFork, TheRankThatComesLastIsNamedOnAll) {
  for (const auto& [hosts, victim, told] : kLateRanks) {
    SCOPED_TRACE(testing::Message() << join(hosts) << ", rank " << victim);
    const ForkedJob job;
    const auto options =
        options_of("hierarchical", delays(kTimes, kLate, [victim = victim](int) { return std::vector<int>{victim}; }));
    const int n = static_cast<int>(hosts.size());
    ForkedRanks ranks(n, [&, victim = victim, told = told](int rank) -> std::string {
      testing::internal::CaptureStderr();
      {
        World world = job.join(rank, n, options, hosts);
        const World::Scope scope(world);
        collectives_of_all_kinds(kTimes, n);
        expect_straggler(world, victim, told);
      }
      const std::string said = testing::internal::GetCapturedStderr();
      EXPECT_EQ(contains(said, text("rank ", victim, " came last to ")), rank == 0) << said;
      return {};
    });
    for (const auto& end : ranks.wait_all(patience())) EXPECT_TRUE(end.exited && end.status == 0) << end.said;
  }
}

// If ranks of one host are late together, no single one of them is named, but their host is. By turns one of them is
// even later, so that chance does not choose the same one each time.
TEST(Hosts, TheHostThatComesLastIsNamed) {
  run_on(
      {"a", "a", "b", "b"},
      [](World& world) {
        collectives_of_all_kinds(kTimes, 4);
        EXPECT_CONTAINS(world.group().straggler_report(), "the host of ranks 2, 3 came last to ");
        barrier();  // no rank ends while others look
      },
      options_of("auto", delays(kTimes, kLate, [](int i) {
                   return std::vector<int>{2, 3, 2 + i / 2 % 2};
                 })));
}

// All ranks are late, but by turns.
TEST(Hosts, WhereRanksTakeTurnsNobodyIsNamed) {
  for (const auto& hosts : {Hosts{"a", "a", "b", "b"}, {"a", "b", "b", "c"}}) {
    testing::internal::CaptureStderr();
    run_on(
        hosts,
        [](World& world) {
          collectives_of_all_kinds(kTimes, 4);
          for (const auto& rank : world.group().stragglers()) EXPECT_LE(rank.times_last, uint64_t{kTimes / 2});
          EXPECT_EQ(world.group().straggler_report(), "");
        },
        options_of("auto", delays(kTimes, milliseconds(20), [](int i) { return std::vector<int>{i % 4}; })));
    EXPECT_EQ(testing::internal::GetCapturedStderr().find("came last"), std::string::npos);
  }
}

// In a broadcast, the leader of a host that does not have the root begins with the wire. So the other hosts wait only
// for that leader.
TEST(Hosts, BroadcastsTellToo) {
  static constexpr int kLeader = 1;
  run_on(
      {"a", "b", "b"},
      [](World& world) {
        const at::Tensor t = at::full({20'000}, world.rank());
        for (int i = 0; i < kTimes; ++i) broadcast(t, 0);
        EXPECT_CONTAINS(world.group().straggler_report(), text("rank ", kLeader, " came last to "));
        barrier();
      },
      options_of("auto", delays(kTimes, milliseconds(20), [](int) { return std::vector<int>{kLeader}; })));
}

}  // namespace
}  // namespace muster::test::faked_hosts
