// Waiting for what another thread or process does, where nothing rings a bell.
//
// Thread-safety: all functions.
#pragma once

#include <poll.h>

#include "support/patience.h"

namespace muster::test {

// Whether `condition` comes true in time.
template <typename Condition>
bool eventually(Condition condition) {
  for (const auto deadline = patience(); !deadline.passed(); ::poll(nullptr, 0, 1))
    if (condition()) return true;
  return false;
}

}  // namespace muster::test
