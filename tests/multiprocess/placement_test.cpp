// muster run --pin and -v on this machine.
#include <gmock/gmock.h>

#include <algorithm>
#include <thread>

#include "base/cores.h"
#include "launch/ranks/environment.h"
#include "launch/ranks/placement.h"
#include "launch/ranks/topology.h"
#include "multiprocess/job_test.h"

namespace muster::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

const Words kShowAffinity = {"sh", "-c", "grep Cpus_allowed_list /proc/self/status; echo OMP $OMP_NUM_THREADS"};

// Without OMP_NUM_THREADS, on this one processor.
Words narrowed(int processor, Words command) {
  Words words{"/usr/bin/env", "-u", "OMP_NUM_THREADS", "taskset", "-c", text(processor)};
  words.insert(words.end(), command.begin(), command.end());
  return words;
}

class Pinning : public ::testing::Test {
 protected:
  void SetUp() override {
    cores_ = launch::only(launch::cores_of_machine(), launch::allowed_processors());
    if (cores_.empty()) GTEST_SKIP() << "hwloc is not here: apt-get install libhwloc15";
    for (const auto& core : cores_)
      if (!launch::claim(core)) GTEST_SKIP() << "another job on this machine is pinned";
  }
  std::vector<launch::Core> cores_;
};

TEST_F(Pinning, RanksStayOnCoresOfTheirOwn) {
  const int ranks = std::min(static_cast<int>(cores_.size()), usable_cores());
  Process job(run_program({"-n", text(ranks), "-v", "--pin", "cores"}, kShowAffinity));
  ASSERT_EQ(job.finish(), 0) << job.err;
  const auto expected = launch::spread(cores_, ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& processors = expected[static_cast<size_t>(rank)].processors;
    EXPECT_THAT(job.err, ContainsRegex(text("muster: rank ", rank, ": pid [0-9]+, processors ",
                                            launch::name_of(processors), ", [0-9]+ OMP")));
    if (processors.size() == 1) {
      EXPECT_THAT(job.out, HasSubstr(text('[', rank, "] Cpus_allowed_list:\t", processors[0], '\n')));
    }
  }
}

TEST_F(Pinning, AutoPinsOnlyWhereTheAffinityWasNarrowed) {
  const int processor = cores_[0].processors[0];
  Process open(run_program({"-n", "1", "-v"}, kShowAffinity));
  ASSERT_EQ(open.finish(), 0);
  if (std::thread::hardware_concurrency() == static_cast<unsigned>(::sysconf(_SC_NPROCESSORS_ONLN))) {
    EXPECT_THAT(open.err, HasSubstr("muster: ranks are not pinned: the machine is open to other work"));
  }
  if (::sysconf(_SC_NPROCESSORS_ONLN) < 2) GTEST_SKIP() << "one processor cannot be narrowed";
  Process job(narrowed(processor, run_program({"-n", "1", "-v"}, kShowAffinity)));
  ASSERT_EQ(job.finish(), 0) << job.err;
  EXPECT_THAT(job.err, ContainsRegex(text("rank 0: pid [0-9]+, processors ", processor, ", 1 OMP threads")));
  EXPECT_THAT(job.out, HasSubstr("OMP 1\n"));
  Process none(narrowed(processor, run_program({"-n", "1", "-v", "--pin", "none"}, kShowAffinity)));
  ASSERT_EQ(none.finish(), 0) << none.err;
  EXPECT_THAT(none.err, HasSubstr("any processor"));
}

TEST_F(Pinning, MoreRanksThanCoresRunAnywhere) {
  Process job(run_program({"-n", text(cores_.size() + 1), "-v", "--pin", "cores"}, kShowAffinity));
  ASSERT_EQ(job.finish(), 0);
  EXPECT_THAT(job.err, ContainsRegex("ranks are not pinned: there are more ranks than"));
}

TEST_F(Pinning, TwoJobsNeverPinToTheSameCore) {
  const int ranks = std::min(static_cast<int>(cores_.size()), usable_cores());
  Process first(run_program({"-n", text(ranks), "-v", "--pin", "cores"}, {kLaunchProgram, "signals"}));
  for (int rank = 0; rank < ranks; ++rank) ASSERT_TRUE(first.read_until(text('[', rank, "] ready"))) << first.err;
  Process second(run_program({"-n", "1", "-v", "--pin", "cores"}, kShowAffinity));
  ASSERT_EQ(second.finish(), 0);
  EXPECT_THAT(second.err, HasSubstr("ranks are not pinned: another job is pinned to"));
  first.signal(SIGKILL);
  first.wait();
  ASSERT_TRUE(processes_left(patience()).empty());
  Process third(run_program({"-n", "1", "-v", "--pin", "cores"}, kShowAffinity));
  ASSERT_EQ(third.finish(), 0);
  EXPECT_THAT(third.err, HasSubstr("processors ")) << "a job that died holds no core";
}

TEST_F(Pinning, WhatTheUserSetsStays) {
  Process job(run_program({"-n", "1", "--pin", "cores"}, kShowAffinity), {.env = {"OMP_NUM_THREADS=7"}});
  ASSERT_EQ(job.finish(), 0);
  EXPECT_THAT(job.out, HasSubstr("OMP 7\n"));
}

TEST(PinningInput, IsChecked) {
  Process job(run_program({"-n", "1", "--pin", "tight"}, {"true"}));
  EXPECT_EQ(job.finish(), 2);
  EXPECT_EQ(job.err, "muster: --pin: expected auto, none or cores, got 'tight'. Use for example --pin cores\n");
}

}  // namespace
}  // namespace muster::test
