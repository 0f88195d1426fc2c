// The proof from a ledger that every sample counts once: what it accepts, and what it finds.
#include "launch/jobs/ledger_check.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/text.h"
#include "launch/jobs/ledger_line.h"
#include "muster/base/error.h"

namespace muster::test {
namespace {

using launch::LedgerLine;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Samples = std::vector<uint64_t>;

std::string attempt(int64_t number, int rank, int ranks, int64_t after, uint64_t size = 6) {
  return to_string(LedgerLine{
      .attempt = number, .rank = rank, .step = after, .ranks = ranks, .dataset_size = size, .training = "a net"});
}
std::string step(int64_t number, int rank, int64_t step, uint64_t epoch, const Samples& samples) {
  return to_string(LedgerLine{.kind = LedgerLine::Kind::kStep,
                              .attempt = number,
                              .rank = rank,
                              .step = step,
                              .epoch = epoch,
                              .samples = samples});
}
std::string made(int64_t number, int rank, int64_t step) {
  return to_string(LedgerLine{.kind = LedgerLine::Kind::kMade, .attempt = number, .rank = rank, .step = step});
}

class LedgerCheck : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& bytes, const std::string& name = "ledger") {
    const auto path = folder_ / name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path.string();
  }
  std::string good(const std::string& bytes, const launch::LedgerCheckOptions& options = {}) {
    const auto check = launch::check_ledger({write(bytes)}, options);
    EXPECT_TRUE(check.is_exactly_once) << check.words;
    EXPECT_THAT(check.words, HasSubstr("every sample counts once\n"));
    return check.words;
  }
  std::string bad(const std::string& bytes, const launch::LedgerCheckOptions& options = {}) {
    const auto check = launch::check_ledger({write(bytes)}, options);
    EXPECT_FALSE(check.is_exactly_once) << check.words;
    EXPECT_THAT(check.words, HasSubstr("NOT exactly once\n"));
    return check.words;
  }

 private:
  const std::filesystem::path folder_ = std::filesystem::temp_directory_path() / text("muster-ledger-", ::getpid());
};

// Two ranks, three steps of an epoch of six samples, without the last `made`.
const std::string kEpoch = attempt(1, 0, 2, 0) + attempt(1, 1, 2, 0) + step(1, 0, 1, 0, {0}) + step(1, 1, 1, 0, {1}) +
                           made(1, 1, 1) + made(1, 0, 1) + step(1, 1, 2, 0, {3}) + step(1, 0, 2, 0, {2}) +
                           made(1, 0, 2) + step(1, 0, 3, 0, {4}) + step(1, 1, 3, 0, {5});

TEST_F(LedgerCheck, LinesAreWhatTheyWere) {
  for (const auto& line : {attempt(3, 1, 4, 100, 60000), step(2, 7, 9, 5, {1, 2, 18446744073709551615u}),
                           step(2, 7, 9, 5, {}), made(1, 0, 12)}) {
    ASSERT_TRUE(line.starts_with('\n') && line.ends_with('\n'));
    const std::string inner = line.substr(1, line.size() - 2);
    const auto parsed = launch::parse_ledger_line(inner);
    ASSERT_TRUE(parsed) << line;
    EXPECT_EQ(to_string(*parsed), line);
    for (size_t cut = 0; cut < inner.size(); ++cut) {
      EXPECT_FALSE(launch::parse_ledger_line(inner.substr(0, cut)));
      EXPECT_FALSE(launch::parse_ledger_line(inner.substr(inner.size() - cut)));
      std::string changed = inner;
      changed[cut] = static_cast<char>(changed[cut] ^ 1);
      EXPECT_FALSE(launch::parse_ledger_line(changed)) << changed;
    }
  }
}

TEST_F(LedgerCheck, AStepCountsWhenARankHasMadeIt) {
  EXPECT_THAT(good(kEpoch), HasSubstr("epoch 0: 4 of 6 samples so far, each once"));
  EXPECT_THAT(good(kEpoch + made(1, 1, 3)), HasSubstr("epoch 0: 6 samples, each once"));
  EXPECT_THAT(good(kEpoch + made(1, 1, 3)), HasSubstr("attempt 1, 2 ranks: steps 1 to 3 count\n"));
  good(kEpoch + made(1, 1, 3), {.epochs = 1});
  EXPECT_THAT(bad(kEpoch, {.epochs = 1}), HasSubstr("epoch 0: 2 samples do not count: 4, 5"));
  EXPECT_THAT(bad(kEpoch + made(1, 1, 3), {.epochs = 2}), HasSubstr("problem: epoch 1 has no samples"));
}

TEST_F(LedgerCheck, ALaterAttemptReplacesWhatIsAfterItsBegin) {
  // A rank died in step 3. One of three ranks takes other samples, which together are the rest of the epoch.
  const std::string again = attempt(2, 0, 1, 2) + step(2, 0, 3, 0, {5, 4}) + made(2, 0, 3);
  const auto words = good(kEpoch + again, {.epochs = 1});
  EXPECT_THAT(words, HasSubstr("a net: 2 attempts\n"));
  EXPECT_THAT(words, HasSubstr("attempt 2, 1 rank: steps 3 to 3 count\n"));
  // From the snapshot after step 1.
  const std::string earlier = attempt(2, 0, 1, 1) + step(2, 0, 2, 0, {2, 3}) + made(2, 0, 2);
  EXPECT_THAT(good(kEpoch + earlier), HasSubstr("attempt 1, 2 ranks: steps 1 to 1 count; those up to 2 were replaced"));
  good(kEpoch + earlier + attempt(3, 0, 1, 2) + step(3, 0, 3, 0, {4, 5}) + made(3, 0, 3), {.epochs = 1});
  // One that was killed before its first step changes nothing; the next may begin at the same step, or before it.
  good(kEpoch + attempt(2, 0, 1, 2) + attempt(3, 0, 1, 1) + step(3, 0, 2, 0, {2, 3, 4, 5}) + made(3, 0, 2),
       {.epochs = 1});
  EXPECT_THAT(good(kEpoch + attempt(2, 0, 1, 0)), HasSubstr("none of its steps count; those up to 2 were replaced"));
}

TEST_F(LedgerCheck, FindsWhatCountsTwiceOrNotAtAll) {
  // A position that was saved too late: samples 2 and 3 were skipped.
  EXPECT_THAT(bad(kEpoch + attempt(2, 0, 1, 1) + step(2, 0, 2, 0, {4, 5}) + made(2, 0, 2), {.epochs = 1}),
              HasSubstr("epoch 0: 2 samples do not count: 2, 3"));
  // Too early.
  const auto words = bad(kEpoch + attempt(2, 0, 1, 2) + step(2, 0, 3, 0, {3, 4}) + made(2, 0, 3));
  EXPECT_THAT(words, HasSubstr("sample 3 counts in step 2 (attempt 1, rank 1) and in step 3 (attempt 2, rank 0)"));
  // An epoch that ends too early shows when the next one has begun.
  EXPECT_THAT(bad(kEpoch + made(1, 0, 3) + step(1, 0, 4, 2, {0}) + made(1, 0, 4)), HasSubstr("epoch 1 has no samples"));
  EXPECT_THAT(bad(attempt(1, 0, 1, 0) + step(1, 0, 1, 0, {0, 1}) + step(1, 0, 1, 1, {0}) + made(1, 0, 1)),
              HasSubstr("epoch 0: 4 samples do not count: 2, 3, 4, 5"));
  EXPECT_THAT(bad(attempt(1, 0, 1, 0) + step(1, 0, 1, 0, {6}) + made(1, 0, 1)), HasSubstr("sample 6 of 6 in step 1"));
}

TEST_F(LedgerCheck, SparesWhatSamplersPadOrDrop) {
  const std::string padded = kEpoch + made(1, 0, 3) + step(1, 0, 4, 0, {0}) + made(1, 0, 4);
  EXPECT_THAT(bad(padded), HasSubstr("sample 0 counts in step 1 (attempt 1, rank 0) and in step 4"));
  EXPECT_THAT(good(padded, {.spare = 1}), HasSubstr("repeated, as allowed"));
  EXPECT_THAT(good(kEpoch, {.epochs = 1, .spare = 2}), HasSubstr("missing, as allowed: 4, 5"));
  bad(kEpoch, {.epochs = 1, .spare = 1});
}

TEST_F(LedgerCheck, ANumberOfSamplesThatNobodyKnows) {
  const auto all = attempt(1, 0, 1, 0, 0) + step(1, 0, 1, 0, {5, 1ull << 60}) + step(1, 0, 1, 1, {5}) + made(1, 0, 1);
  EXPECT_THAT(good(all, {.epochs = 2}), HasSubstr("epoch 0: 2 samples, each once"));
  EXPECT_THAT(bad(all + step(1, 0, 2, 1, {5}) + made(1, 0, 2)), HasSubstr("epoch 1: sample 5 counts in step 1"));
}

TEST_F(LedgerCheck, FindsAttemptsThatDoNotFit) {
  EXPECT_THAT(bad(attempt(1, 0, 2, 0) + attempt(1, 1, 2, 3)),
              HasSubstr("after step 0 on one rank, and after step 3 on rank 1"));
  EXPECT_THAT(bad(attempt(3, 0, 2, 7)), HasSubstr("nothing is known of the steps up to 7"));
  EXPECT_THAT(bad(kEpoch + attempt(2, 0, 2, 3)),
              HasSubstr("attempt 2 begins after step 3, but attempt 1 before it ends with step 2"));
  EXPECT_THAT(bad(attempt(1, 0, 1, 0) + attempt(2, 0, 1, 0, 7)), HasSubstr("attempt 2 is of another training"));
}

// Ranks that were killed leave parts of lines, behind which others write on.
TEST_F(LedgerCheck, PartsOfLinesAreNoLines) {
  const auto last = made(1, 1, 3), lost = step(1, 1, 4, 1, {1, 2, 3});
  for (size_t cut = 0; cut <= lost.size(); ++cut) {
    const auto words = good(kEpoch + lost.substr(0, cut) + last, {.epochs = 1});
    EXPECT_EQ(words.find(", 1 line cut off") != std::string::npos, cut > 1 && cut + 1 < lost.size()) << cut;
  }
  EXPECT_THAT(good(kEpoch + "\nnot a line\n\nstep 1 #\n"), HasSubstr("2 lines cut off"));
  // A part in the middle of what counts is missed.
  std::string all = kEpoch + last;
  all[all.find("epoch 0: 3") + 9] = '1';
  EXPECT_THAT(bad(all, {.epochs = 1}), HasSubstr("epoch 0: 1 sample does not count: 3"));
}

// The other half of the ranks may have had the same samples.
TEST_F(LedgerCheck, MissesTheFilesOfOtherHosts) {
  const std::string one = attempt(1, 0, 2, 0) + step(1, 0, 1, 0, {0, 1, 2}) + made(1, 0, 1);
  EXPECT_THAT(bad(one), HasSubstr("attempt 1 has 2 ranks, and there are lines of 1: give the files of all hosts"));
  EXPECT_THAT(bad(kEpoch + made(1, 0, 3) + step(2, 0, 4, 1, {0})), HasSubstr("nobody has said how attempt 2 began"));
}

// It replaces nothing, because the training did not go on from it.
TEST_F(LedgerCheck, AnAttemptWithoutStepsIsForgotten) {
  const std::string all = kEpoch + made(1, 0, 3) + attempt(2, 0, 1, 1) + step(2, 0, 2, 0, {5}) + attempt(3, 0, 1, 3) +
                          step(3, 0, 4, 1, {0, 1, 2, 3, 4, 5}) + made(3, 0, 4);
  EXPECT_THAT(good(all, {.epochs = 2}), HasSubstr("attempt 2, 1 rank: none of its steps count\n"));
}

TEST_F(LedgerCheck, NumbersOfEpochsThatCannotBe) {
  const std::string begin = attempt(1, 0, 1, 0);
  EXPECT_THAT(bad(begin + step(1, 0, 1, UINT64_MAX, {0, 0}) + made(1, 0, 1)),
              AllOf(HasSubstr("have no samples"), HasSubstr("sample 0 counts in step 1")));
  EXPECT_THAT(bad(begin + step(1, 0, 1, 1'000'000'000'000, {0}) + made(1, 0, 1)),
              HasSubstr("epochs 0 to 999999999999 have no samples"));
}

TEST_F(LedgerCheck, TakesTheFilesOfSeveralHosts) {
  const auto one = write(attempt(1, 0, 2, 0) + step(1, 0, 1, 0, {0, 1, 2}), "one");
  const auto two = write(attempt(1, 1, 2, 0) + step(1, 1, 1, 0, {3, 4, 5}) + made(1, 1, 1), "two");
  EXPECT_TRUE(launch::check_ledger({one, two}, {.epochs = 1}).is_exactly_once);
  EXPECT_FALSE(launch::check_ledger({two}, {.epochs = 1}).is_exactly_once);
}

TEST_F(LedgerCheck, NamesAtMostSomeProblems) {
  std::string all = attempt(1, 0, 1, 0);
  for (int64_t i = 1; i <= 1000; ++i) all += step(1, 0, i, 0, {99}) + made(1, 0, i);
  const auto words = bad(all);
  EXPECT_THAT(words, HasSubstr("… and 980 more problems"));
  EXPECT_LT(words.size(), 3000u);
}

TEST_F(LedgerCheck, RefusesWhatIsNoLedger) {
  EXPECT_THROW(launch::check_ledger({write("something else\n")}), CorruptError);
  EXPECT_THROW(launch::check_ledger({write("")}), CorruptError);
  EXPECT_THROW(launch::check_ledger({write("") + "-that-is-not-there"}), Unavailable);
}

}  // namespace
}  // namespace muster::test
