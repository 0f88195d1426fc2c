// How long a test waits for what must come. Only a test that hangs waits that long: no verdict depends on the machine's
// load. ctest's own limit for a test (MUSTER_TEST_TIMEOUT) lies above it.
#pragma once

#include <chrono>

#include "muster/base/deadline.h"

namespace muster::test {

inline constexpr std::chrono::minutes kPatience{10};
inline Deadline patience() { return Deadline::after(kPatience); }

}  // namespace muster::test
