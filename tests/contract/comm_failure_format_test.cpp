// The texts of failures: on every backend they say who failed, why, which rank found that, and what the rank that reads
// them did last.

#include <ATen/ops/ones.h>

#include <regex>
#include <string>
#include <thread>

#include "base/text.h"
#include "comm/core/backend.h"
#include "muster/comm/collectives.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

class FailureFormat : public CommContract {
 protected:
  static void tell(World& world, const std::string& key) { world.store().set(key, "1"); }
  static void wait_for(World& world, const std::string& key) { world.store().get(key, patience()); }
};
MUSTER_COMM_CONTRACT(FailureFormat);

// `what` [seen by rank `finder`; last on rank `reader`: `last`…]. …
void expect_format(const std::string& message, const std::string& what, const std::string& finder, int reader,
                   const std::string& last) {
  const std::regex format(text(what, " \\[seen by rank ", finder, "; last on rank ", reader, ": ", last,
                               "[^\\[\\]]*\\]", "(\\. [^\\[]*)?"));
  EXPECT_TRUE(std::regex_match(message, format)) << message;
}

TEST_P(FailureFormat, OfAnAbort) {
  run(3, [](World& world) {
    all_reduce(at::ones({2}));
    if (world.rank() == 2) comm::backend_of(world.group()).abort();
    const auto said = message_of<Aborted>([] {
      for (;;) barrier();
    });
    expect_format(said, "rank 2 aborted group 'world'", "2", world.rank(), "(all_reduce #0|barrier)");
  });
}

TEST_P(FailureFormat, OfATimeout) {
  run(3, [](World& world) {
    all_reduce(at::ones({2}));
    if (world.rank() == 1)
      wait_for(world, "has timed out");
    else if (world.rank() == 0)
      comm::backend_of(world.group()).setTimeout(std::chrono::milliseconds(200));
    const auto said = message_of<TimeoutError>([] { barrier(); });
    if (world.rank() == 0) tell(world, "has timed out");
    expect_format(said, "barrier.* timed out after .*waiting for .*rank 1.*", "0", world.rank(),
                  world.rank() == 1 ? "(all_reduce #0|barrier)" : "barrier");
  });
}

// Rank 1 ends by an exception, and the others are told by it.
TEST_P(FailureFormat, OfALoss) {
  if (!as_threads()) GTEST_SKIP() << "the rank's process would end";
  std::vector<std::string> said(3);
  EXPECT_THROW(run(3,
                   [&](World& world) {
                     all_reduce(at::ones({2}));
                     if (world.rank() == 1) throw std::runtime_error("no more data");
                     said[static_cast<size_t>(world.rank())] = message_of<PeerLost>([] { barrier(); });
                   }),
               std::runtime_error);
  for (const int rank : {0, 2})
    expect_format(said[static_cast<size_t>(rank)], "rank 1 ended: no more data", "1", rank, "(all_reduce #0|barrier)");
}

}  // namespace
}  // namespace muster::test
