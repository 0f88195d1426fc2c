// What workers keep for gradients of other workers, and that nothing of it is left.
#pragma once

#include <gtest/gtest.h>

#include "muster/autograd/context.h"
#include "muster/rpc/call.h"
#include "muster/rpc/worker.h"
#include "support/patience.h"

namespace muster::test {

// No living worker keeps a graph, arguments, a context or an object. Soon: references are released by message.
inline void expect_nothing_left() {
  for (const auto& worker : rpc::all_workers()) {
    if (!rpc::is_alive(worker.id)) continue;
    const auto left = [&] {
      return rpc::sync<[] {
        const auto census = autograd::census();
        return census.sub_graphs + census.arguments + census.contexts + rpc::census().owned_objects;
      }>(worker);
    };
    const auto until = patience();
    while (left() != 0 && !until.passed()) {
    }
    EXPECT_EQ(left(), 0u) << worker.name;
  }
}

}  // namespace muster::test
