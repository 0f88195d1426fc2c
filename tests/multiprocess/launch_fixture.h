// What the tests of muster run have in common.
#pragma once

#include <gmock/gmock.h>

#include "multiprocess/job_test.h"

namespace muster::test::launched_jobs {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

class Launch : public JobTest {};

}  // namespace muster::test::launched_jobs
