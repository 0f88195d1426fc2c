// The ledger of a training whose ranks restart, in any number, and what the check says of it.
#include "muster/data/ledger.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/text.h"
#include "launch/jobs/ledger_check.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/data/sampler.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

class LedgerFile : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(const std::string& name = "ledger") const { return (folder_ / name).string(); }
  launch::LedgerCheck check(const launch::LedgerCheckOptions& options = {}) const {
    return launch::check_ledger({path()}, options);
  }

  // Ranks that begin after `first` steps with this sampler's position, and make steps up to `last` of 24 samples
  // together. Then one dies with samples that have entered a step.
  void attempt(int ranks, int64_t first, int64_t last, int64_t wrong_by = 0) const {
    run_threads(ranks, [&](World& world) {
      DistributedSampler sampler(kSize, {.seed = 3});
      const auto per_rank = static_cast<size_t>(24 / world.world_size());
      constexpr int64_t kSteps = kSize / 24;
      const int64_t at = first + wrong_by;
      sampler.seek(static_cast<uint64_t>(at / kSteps), static_cast<size_t>(at % kSteps) * per_rank);
      sampler.reset();
      Ledger ledger(path(), {.dataset_size = kSize, .steps = first});
      while (ledger.steps() < last) {
        auto batch = sampler.next(per_rank);
        if (!batch) {
          sampler.set_epoch(sampler.epoch() + 1);
          sampler.reset();
          batch = sampler.next(per_rank);
        }
        ledger.enter(sampler.epoch(), *batch);
        barrier();
        ledger.step();
      }
      if (world.rank() == 0) ledger.enter(sampler.epoch(), std::vector<size_t>{0, 1, 2});
    });
  }
  static constexpr int64_t kSize = 96;

 private:
  const std::filesystem::path folder_ = std::filesystem::temp_directory_path() / text("muster-ledgers-", ::getpid());
};

TEST_F(LedgerFile, EverySampleCountsOnceThroughRestarts) {
  attempt(4, 0, 7);
  attempt(3, 5, 9);  // from a snapshot
  attempt(1, 9, 9);  // no step
  attempt(2, 9, 20);
  const auto result = check({.epochs = 5});
  EXPECT_TRUE(result.is_exactly_once) << result.words;
  EXPECT_CONTAINS(result.words, "attempt 1, 4 ranks: steps 1 to 5 count; those up to 7 were replaced");
  EXPECT_CONTAINS(result.words, "attempt 4, 2 ranks: steps 10 to 20 count");
}

TEST_F(LedgerFile, APositionThatIsWrongShows) {
  attempt(4, 0, 7);
  attempt(4, 6, 8, -1);
  EXPECT_FALSE(check().is_exactly_once);
  EXPECT_CONTAINS(check().words, " counts in step 6 (attempt 1, rank ");
  EXPECT_CONTAINS(check().words, " and in step 7 (attempt 2, rank ");
}

TEST_F(LedgerFile, StepsWithoutOrWithSeveralBatches) {
  run_threads(2, [&](World& world) {
    Ledger first(path(), {.dataset_size = 4, .training = "some", .sync = true});
    Ledger ledger = std::move(first);
    const std::vector<size_t> one{0, 1}, two{2}, three{3};
    if (world.rank() == 0)
      for (const auto* batch : {&one, &two, &three}) ledger.enter(0, *batch);
    ledger.step();
    EXPECT_EQ(ledger.steps(), 1);
  });
  EXPECT_TRUE(check({.epochs = 1}).is_exactly_once) << check().words;
}

TEST_F(LedgerFile, BadUseIsRefused) {
  attempt(2, 0, 2);
  run_threads(2, [&](World& world) {
    const auto refusal = [&](const LedgerOptions& options) {
      return message_of<InvalidArgument>([&] { Ledger(path(), options); });
    };
    EXPECT_CONTAINS(refusal({.dataset_size = 97}),
                    ": expected the ledger of training with 97 samples, got that of training with 96");
    EXPECT_CONTAINS(refusal({.dataset_size = 96, .training = "other"}), "expected the ledger of other with 96");
    EXPECT_CONTAINS(refusal({.dataset_size = 96, .steps = world.rank()}), "after different steps: 0 and 1");
    EXPECT_CONTAINS(refusal({.dataset_size = 96, .steps = -1}), "steps: expected 0 or more, got -1");
    EXPECT_CONTAINS(refusal({.dataset_size = 96, .training = "a\nb"}), "one line");
    const auto own = path(text(world.rank()));
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { Ledger(own, {.training = text(world.rank())}); }),
                    "different names");
    // On one rank only: the other learns it.
    const auto message = message_of<Unavailable>(
        [&] { Ledger(world.rank() == 1 ? path("no/such/folder") : path(), {.dataset_size = 96}); });
    EXPECT_CONTAINS(message, world.rank() == 1 ? "cannot write the ledger" : "rank 1 cannot use its ledger");
  });
}

TEST_F(LedgerFile, AFullDiskIsAnError) {
  run_threads(1, [&](World&) {
    Ledger ledger(path(), {.dataset_size = 96});
    rlimit before{};
    ::getrlimit(RLIMIT_FSIZE, &before);
    const auto handler = ::signal(SIGXFSZ, SIG_IGN);  // write(2) then fails with EFBIG, or writes a part
    const rlimit limit{std::filesystem::file_size(path()) + 10, before.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::vector<size_t> samples{1, 2, 3};
    EXPECT_CONTAINS(message_of<Unavailable>([&] { ledger.enter(0, samples); }),
                    "cannot write a whole line to the ledger");
    EXPECT_CONTAINS(message_of<Unavailable>([&] { ledger.enter(0, samples); }), "cannot write to the ledger");
    ::setrlimit(RLIMIT_FSIZE, &before);
    ::signal(SIGXFSZ, handler);
    ledger.enter(0, samples);
    ledger.step();
  });
  const auto result = check();
  EXPECT_TRUE(result.is_exactly_once) << result.words;
  EXPECT_CONTAINS(result.words, ", 1 line cut off");
  EXPECT_CONTAINS(result.words, "epoch 0: 3 of 96 samples so far, each once");
}

}  // namespace
}  // namespace muster::test
