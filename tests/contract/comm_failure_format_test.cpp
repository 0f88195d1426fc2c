// The texts of failures: on every backend they say who failed, why, which rank found that, and what the rank that reads
// them did last.

#include <ATen/ops/ones.h>

#include <exception>
#include <mutex>
#include <regex>
#include <string>
#include <thread>
#include <vector>

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
  static std::mutex mutex;  // making a std::regex fills a cache that all threads share, without a lock
  const std::lock_guard lock(mutex);
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

// Before any operation of its own has failed.
TEST_P(FailureFormat, OfAKnownFailure) {
  run(3, [](World& world) {
    const Group group = world.new_group({0, 1, 2});
    comm::Backend& backend = comm::backend_of(group);
    all_reduce(at::ones({2}), {.group = group});
    EXPECT_EQ(backend.known_failure(), nullptr);
    barrier();
    if (world.rank() == 2) {
      backend.abort();
      tell(world, "has aborted");
    }
    wait_for(world, "has aborted");
    const auto said = message_of<Aborted>([&] {
      if (const auto known = backend.known_failure()) std::rethrow_exception(known);
    });
    expect_format(said, "rank 2 aborted group 'group 1'", "2", world.rank(), "all_reduce #0");
    backend.leave("");
    EXPECT_EQ(backend.known_failure(), nullptr);
  });
}

// A group that a library makes for itself numbers the ranks as its user does.
TEST_P(FailureFormat, NumbersTheRanksAsTheParentIfAsked) {
  run(4, [](World& world) {
    Group of_world = world.new_group({1, 3}, {.parents_ranks = true});
    if (world.rank() == 3) comm::backend_of(of_world).abort();
    if (of_world.is_member()) {
      const auto said = message_of<Aborted>([&] {
        for (;;) barrier({.group = of_world});
      });
      expect_format(said, "rank 3 aborted group 'group 1'", "3", world.rank(), "(no operation yet|barrier)");
    }

    // In `outer` the ranks 3, 2 and 1 are 0, 1 and 2. The group of a group of it still numbers them so.
    const Group outer = world.new_group({3, 2, 1});
    if (!outer.is_member()) return;
    const Group inner = outer.split(outer.rank() > 0, 0, {.parents_ranks = true});
    const Group innermost = inner.split(0, 0, {.parents_ranks = true});
    if (innermost.size() != 2) return;
    if (world.rank() == 1) {
      wait_for(world, "has timed out");
      return;
    }
    try {
      barrier({.group = innermost, .timeout = std::chrono::milliseconds(200)});
      ADD_FAILURE() << "nothing was thrown";
    } catch (const TimeoutError& error) {
      EXPECT_EQ(error.missing(), std::vector<int>{2});
      expect_format(error.what(), "barrier.* on rank 1 timed out after .*waiting for .*rank 2.*", "1", 1, "barrier");
    }
    tell(world, "has timed out");
  });
}

}  // namespace
}  // namespace muster::test
