// What the tests of jobs that start again have in common.
#pragma once

#include <gmock/gmock.h>

#include <chrono>
#include <iostream>

#include "multiprocess/job_test.h"
#include "support/stolen.h"

namespace muster::test::restarted_jobs {

// In ten seconds of a machine of one's own.
inline void expect_recovered(Clock::time_point killed, const Stolen& stolen) {
  const std::chrono::duration<double> took = Clock::now() - killed;
  const double had = 1 - stolen.share();
  std::cout << "survivors ran again after " << took.count() << " s, with " << 100 * had << " % of the processors\n";
  EXPECT_LT(took * had, seconds(10));
}

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Restarts : public JobTest {};

}  // namespace muster::test::restarted_jobs
