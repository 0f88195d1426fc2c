// Waits for a work whose operation does not end.
#include "comm/kit/operation_work.h"

#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "support/held_queue.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using comm::CollectiveQueue;

// As a collective that has lost its way, on a thread of the queue or without a queue.
TEST(OperationWork, AWaitGivesUpSomeTimeAfterTheDeadline) {
  const auto queue = std::make_shared<CollectiveQueue>("test");
  HeldQueue held(*queue);
  for (const bool queued : {true, false})
    for (const auto limit : {std::optional<std::chrono::milliseconds>(), std::optional(std::chrono::milliseconds(5))}) {
      comm::OperationWork work(0, nullptr, std::make_shared<comm::OperationCounters>(), queued ? queue : nullptr,
                               {comm::Operation{.kind = comm::OpKind::kBarrier}},
                               Deadline::after(std::chrono::milliseconds(1)), limit,
                               /*slack=*/std::chrono::milliseconds(1));
      std::string message;
      try {
        work.wait(kNoTimeout);
      } catch (const std::exception& error) {
        message = error.what();
      }
      EXPECT_CONTAINS(message, "barrier is still under way");
      EXPECT_CONTAINS(message, limit ? "Operation timed out" : "after its deadline");
      work.complete();
      EXPECT_TRUE(work.wait(kNoTimeout));
    }
  held.release();
}

}  // namespace
}  // namespace muster::test
