// Whether this is ./dev test --full. The gate (./dev test) runs a part of the cases where all of them take long.
#pragma once

#include <cstdlib>

namespace muster::test {

inline bool full_run() { return std::getenv("MUSTER_TEST_FULL") != nullptr; }

}  // namespace muster::test
