// muster::elastic::run() under muster run: ranks that kill themselves in any phase of a step, and a training that goes
// on as if nothing had been.
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>

#include "launch/jobs/ledger_check.h"
#include "multiprocess/job_test.h"

namespace muster::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int kSteps = 12;

struct Training {
  int status = 0;
  std::string err;
  std::map<std::string, std::string> losses;   // by step
  std::map<std::string, std::string> buffers;  // their checksum, by rank
  std::multiset<std::string> parameters;       // their checksums, of all ranks
};

// Whatever ranks were killed, the samples of three epochs have entered the steps that count, each once.
void expect_exactly_once(const std::string& ledger) {
  const auto check = launch::check_ledger({ledger}, {.epochs = 3});
  EXPECT_TRUE(check.is_exactly_once) << check.words;
}

Training train(int ranks, const Words& deaths, const Words& options = {"--max-restarts", "9"}) {
  Words command{kMusterCommand, "run", "-n", std::to_string(ranks)};
  command.insert(command.end(), options.begin(), options.end());
  command.insert(command.end(), {kElasticProgram, std::to_string(kSteps)});
  command.insert(command.end(), deaths.begin(), deaths.end());
  const auto ledger = std::filesystem::temp_directory_path() / text("muster-elastic-ledger-", ::getpid());
  Process::Options process;
  process.env = {"ELASTIC_LEDGER=" + ledger.string()};
  Process job(command, process);
  Training training;
  training.status = job.finish(patience());
  training.err = job.err;
  for (const auto& line : lines_of(job.out)) {
    const auto rank = line.substr(0, line.find(' ')), words = line.substr(line.find(' ') + 1);
    if (words.starts_with("step ")) training.losses[words.substr(0, words.find(" loss"))] = words;
    if (!words.starts_with("final ")) continue;
    const auto buffers = words.find(" buffers"), after = words.find(" after");
    training.parameters.insert(words.substr(0, buffers));
    training.buffers[rank] = words.substr(buffers, after - buffers);
  }
  EXPECT_THAT(processes_left(patience()), IsEmpty());
  if (training.status == 0) expect_exactly_once(ledger);
  std::filesystem::remove(ledger);
  return training;
}

// Parameters to the bit, on all ranks; each loss that was printed, of which only `missing` may not have been. Buffers
// are each rank's own, but begin each step as rank 0's, so they are the same where rank 0 lived and nobody died in the
// last step: `of_all` says so.
void expect_same(const Training& disturbed, const Training& quiet, size_t missing, bool of_all) {
  EXPECT_EQ(disturbed.status, 0) << disturbed.err;
  EXPECT_EQ(disturbed.parameters, quiet.parameters);
  for (const auto& [step, loss] : disturbed.losses) EXPECT_EQ(loss, quiet.losses.at(step));
  EXPECT_GE(disturbed.losses.size() + missing, quiet.losses.size()) << "rank 0 prints each step, if it lives";
  if (of_all) {
    EXPECT_EQ(disturbed.buffers, quiet.buffers);
  }
}

// One death after another, some of them two at the same time, because starting a process is what costs time.
TEST(ElasticProcess, ATrainingGoesOnToTheBitWhereverRanksAreKilled) {
  const Training quiet = train(3, {});
  ASSERT_EQ(quiet.status, 0) << quiet.err;
  ASSERT_EQ(quiet.losses.size(), static_cast<size_t>(kSteps));
  ASSERT_EQ(quiet.parameters.size(), 3u);
  ASSERT_EQ(quiet.parameters.count(*quiet.parameters.begin()), 3u) << "the ranks differ";
  {
    SCOPED_TRACE("rank 0, once with another, and that one in the last step too");
    const Training disturbed = train(
        3, {"0@0:setup", "0@2:before+", "0@4:forward+", "2@4:forward", "0@6:between+", "0@8:after+", "2@11:barrier+"});
    expect_same(disturbed, quiet, 2, false);
    for (const auto* said :
         {"rank 0 is started again, and the others stay (1 of 9)", "rank 2 is started again", "(7 of 9)"})
      EXPECT_THAT(disturbed.err, HasSubstr(said));
  }
  {
    SCOPED_TRACE("the others");
    const Training disturbed = train(
        3, {"2@0:setup", "1@2:before", "2@2:before+", "2@4:forward+", "1@6:forward+", "2@6:after+", "2@8:between+"});
    expect_same(disturbed, quiet, 0, true);
    EXPECT_THAT(disturbed.err, HasSubstr("(7 of 9)"));
  }
}

TEST(ElasticProcess, WithoutRestartsTheLossIsTheEnd) {
  const Training training = train(2, {"1@4:before"}, {});
  EXPECT_EQ(training.status, 128 + SIGKILL);
  EXPECT_THAT(training.err, HasSubstr("rank 1 (pid "));
  EXPECT_THAT(training.err, Not(HasSubstr("started again")));
}

// --- when nobody is left who has the state ---

class ElasticSnapshot : public JobFolderTest {
 protected:
  std::unique_ptr<Process> start(const Words& options, Words deaths) {
    deaths.insert(deaths.begin(), {kElasticProgram, std::to_string(kSteps)});
    Process::Options process;
    process.env = {"ELASTIC_SNAPSHOT=" + path("snapshots"), "ELASTIC_GO=" + path("go"),
                   "ELASTIC_LEDGER=" + path("ledger")};
    return std::make_unique<Process>(run_program(options, deaths), process);
  }
  static std::string parameters(const std::string& out) {
    const auto at = out.find("final ");
    if (at == std::string::npos) return "none";
    return out.substr(at, out.find(" buffers", at) - at);
  }
  static bool is_rank(pid_t pid, int rank) {
    std::ifstream file(text("/proc/", pid, "/environ"));
    std::string variable;
    while (std::getline(file, variable, '\0'))
      if (variable == text("RANK=", rank)) return true;
    return false;
  }
  // Of two ranks. Once for all tests that run in one process.
  static std::string undisturbed() {
    static const Training quiet = train(2, {});
    return quiet.parameters.empty() ? "none" : *quiet.parameters.begin();
  }
};

TEST_F(ElasticSnapshot, RanksOfWhichNoneIsLeftGoOnFromTheLastOne) {
  // One after the other or concurrently, as it happens: the first one's replacement finds no rank that knows more.
  const auto job = start({"-n", "2", "--max-restarts", "2"}, {"0@7:before", "1@7:before"});
  EXPECT_EQ(job->finish(), 0) << job->err;
  EXPECT_THAT(job->out, HasSubstr("rank 0 of 2 from step 6"));
  EXPECT_EQ(parameters(job->out), undisturbed());
  expect_exactly_once(path("ledger"));
}

TEST_F(ElasticSnapshot, SoDoesAJobThatStartsAgainAsAWhole) {
  const auto job = start({"-n", "1", "--max-restarts", "1"}, {"0@7:before"});
  EXPECT_EQ(job->finish(), 0) << job->err;
  EXPECT_THAT(job->err, HasSubstr("the job starts again (1 of 1)"));
  EXPECT_THAT(job->out, HasSubstr("rank 0 of 1 from step 6"));
  expect_exactly_once(path("ledger"));
}

TEST_F(ElasticSnapshot, SoDoesTheNextJobAlsoWithAnotherNumberOfRanks) {
  const auto first = start({"-n", "2", "--grace", "10s"}, {"1@7:before"});  // the other saves what it has, then
  EXPECT_EQ(first->finish(), 128 + SIGKILL);
  std::filesystem::copy(path("snapshots"), path("copy"));
  const auto second = start({"-n", "2"}, {});
  EXPECT_EQ(second->finish(), 0) << second->err;
  EXPECT_THAT(second->out, HasSubstr("rank 1 of 2 from step 7"));
  EXPECT_EQ(parameters(second->out), undisturbed());
  expect_exactly_once(path("ledger"));
  const auto again = start({"-n", "1"}, {});
  EXPECT_EQ(again->finish(), 0) << again->err;
  EXPECT_THAT(again->out, AllOf(Not(HasSubstr("loss")), HasSubstr(undisturbed()))) << "it was finished";
  std::filesystem::remove_all(path("snapshots"));
  std::filesystem::rename(path("copy"), path("snapshots"));
  const auto three = start({"-n", "3"}, {});
  EXPECT_EQ(three->finish(), 0) << three->err;
  EXPECT_THAT(three->out, HasSubstr("rank 2 of 3 from step 7"));
  expect_exactly_once(path("ledger"));
}

TEST_F(ElasticSnapshot, ARankThatIsReplacedTakesTheStateOfOneThatLives) {
  const auto job = start({"-n", "2", "--max-restarts", "1"}, {"0@7:forward"});
  EXPECT_EQ(job->finish(), 0) << job->err;
  EXPECT_THAT(job->out, AllOf(HasSubstr("rank 0 of 2 from step 7"), Not(HasSubstr("from step 6"))));
  EXPECT_EQ(parameters(job->out), undisturbed());
}

TEST_F(ElasticSnapshot, AStopSavesAndTheNextJobGoesOnThere) {
  const auto first = start({"-n", "2", "--max-restarts", "1", "--stop-grace", "30s"}, {"1@4:hold-told"});
  ASSERT_TRUE(first->read_until("rank 1 holds")) << first->err;
  first->signal(SIGTERM);
  ASSERT_EQ(first->wait(Deadline::after(milliseconds(200))), -1) << "it takes its time";
  std::ofstream(path("go")).close();
  EXPECT_EQ(first->finish(), 0) << first->err;
  EXPECT_THAT(first->out, AllOf(HasSubstr("[0] asked to stop after 5 steps"), HasSubstr("[1] asked to stop after 5")));
  EXPECT_THAT(first->err, HasSubstr("saved step 5"));
  const auto second = start({"-n", "2"}, {});
  EXPECT_EQ(second->finish(), 0) << second->err;
  EXPECT_THAT(second->out, HasSubstr("rank 0 of 2 from step 5"));
  EXPECT_EQ(parameters(second->out), undisturbed());
}

// The first step may take longer than the launcher waits.
TEST_F(ElasticSnapshot, AStopBeforeTheFirstStepDoesNone) {
  const auto first = start({"-n", "2", "--stop-grace", "30s"}, {"1@0:setup-hold-told"});
  ASSERT_TRUE(first->read_until("rank 1 holds")) << first->err;
  first->signal(SIGTERM);
  ASSERT_EQ(first->wait(Deadline::after(milliseconds(200))), -1) << "it takes its time";
  std::ofstream(path("go")).close();
  EXPECT_EQ(first->finish(), 0) << first->err;
  EXPECT_THAT(first->out, AllOf(HasSubstr("[0] asked to stop after 0 steps"), HasSubstr("[1] asked to stop after 0")));
  EXPECT_THAT(first->err, HasSubstr("there is nothing to save"));

  std::filesystem::remove(path("go"));
  const auto second = start({"-n", "2", "--stop-grace", "30s"}, {"0@4:hold-told"});
  ASSERT_TRUE(second->read_until("rank 0 holds")) << second->err;
  second->signal(SIGTERM);
  std::ofstream(path("go")).close();
  EXPECT_EQ(second->finish(), 0) << second->err;
  EXPECT_THAT(second->err, HasSubstr("saved step 5"));

  std::filesystem::remove(path("go"));
  const auto third = start({"-n", "2", "--stop-grace", "30s"}, {"1@5:setup-hold"});
  ASSERT_TRUE(third->read_until("rank 1 holds")) << third->err;
  for (const pid_t child : children_of(third->pid()))  // one rank is enough
    if (child != third->pid() && is_rank(child, 1)) ::kill(child, SIGTERM);
  std::ofstream(path("go")).close();
  EXPECT_EQ(third->finish(), 0) << third->err;
  EXPECT_THAT(third->out, AllOf(HasSubstr("[0] asked to stop after 5 steps"), HasSubstr("[1] asked to stop after 5")));
  const auto last = start({"-n", "2"}, {});
  EXPECT_EQ(last->finish(), 0) << last->err;
  EXPECT_THAT(last->out, HasSubstr("rank 0 of 2 from step 5"));
  EXPECT_EQ(parameters(last->out), undisturbed());
}

// Between two epochs: one rank was lost, its successor still starts, and nobody is in a step.
TEST_F(ElasticSnapshot, AStopWhileALostRankIsReplacedSavesWhatTheOthersHave) {
  for (const char* victim : {"1", "0"}) {
    SCOPED_TRACE(victim);
    const auto first =
        start({"-n", "2", "--max-restarts", "1", "--stop-grace", "30s"}, {text(victim, "@4:before"), "start:hold"});
    ASSERT_TRUE(first->read_until("a new one holds")) << first->err;
    first->signal(SIGTERM);
    EXPECT_EQ(first->finish(), 0) << first->err;
    EXPECT_THAT(first->out, HasSubstr("asked to stop after 4 steps"));
    EXPECT_THAT(first->err, HasSubstr(text("rank ", victim[0] == '1' ? 0 : 1, ": saved step 4")));
    const auto second = start({"-n", "2"}, {});
    EXPECT_EQ(second->finish(), 0) << second->err;
    EXPECT_THAT(second->out, HasSubstr("rank 0 of 2 from step 4"));
    EXPECT_EQ(parameters(second->out), undisturbed());
    std::filesystem::remove_all(path("snapshots"));
  }
}

// It says why immediately, and does not take the full disk for another rank that saves.
TEST_F(ElasticSnapshot, AStopThatFindsNoRoomForTheStateSaysSo) {
  const std::string disk = path("snapshots");
  const SmallDisk mounted(disk);
  if (!mounted) GTEST_SKIP() << "needs the right to mount a tmpfs";
  std::ofstream(disk + "/filler") << std::string(1 << 20, 'x');
  const auto job = start({"-n", "2", "--max-restarts", "1", "--stop-grace", "30s"}, {"1@4:before", "start:hold"});
  ASSERT_TRUE(job->read_until("a new one holds")) << job->err;
  job->signal(SIGTERM);
  EXPECT_EQ(job->finish(), 128 + SIGTERM) << job->err;
  EXPECT_THAT(job->err, AllOf(HasSubstr("'muster::Unavailable'"), HasSubstr("No space left on device"),
                              Not(HasSubstr("had not ended"))));
}

// A rank that was started in another's place, and has long been in a step, is ended by a signal like any other.
TEST_F(ElasticSnapshot, AStopOfARankThatReplacedAnotherLongAgoIsNoGoodEnd) {
  Process::Options process;
  process.env = {"ELASTIC_GO=" + path("go")};  // no snapshot, so SIGTERM ends it
  Process job(run_program({"-n", "2", "--max-restarts", "2", "--stop-grace", "30s"},
                          {kElasticProgram, "12", "1@2:before", "start:hold", "0@4:hold"}),
              process);
  ASSERT_TRUE(job.read_until("a new one holds")) << job.err;
  pid_t first = 0;
  for (const pid_t child : children_of(job.pid()))
    if (is_rank(child, 0)) first = child;
  ASSERT_GT(first, 0);
  ::kill(first, SIGSTOP);  // so that it does not come to its own hold before the file is gone again
  std::ofstream(path("go")).close();
  ASSERT_TRUE(job.read_until("a new one goes on")) << job.err;
  std::filesystem::remove(path("go"));
  ::kill(first, SIGCONT);
  ASSERT_TRUE(job.read_until("rank 0 holds")) << job.err;
  ::kill(first, SIGKILL);
  while (job.err.find("rank 0 is started again") == std::string::npos) ASSERT_TRUE(job.read_some_more()) << job.err;
  job.signal(SIGTERM);
  EXPECT_EQ(job.finish(), 128 + SIGTERM) << job.err;
}

// Nobody takes its place, so all end; what they know is not lost with it.
TEST_F(ElasticSnapshot, ALossThatEndsTheJobSavesWhatTheOthersHave) {
  const auto first = start({"-n", "2", "--grace", "10s"}, {"1@4:before"});
  EXPECT_EQ(first->finish(), 128 + SIGKILL) << first->err;
  EXPECT_THAT(first->err, HasSubstr("rank 0: saved step 4"));
  const auto second = start({"-n", "2"}, {});
  EXPECT_EQ(second->finish(), 0) << second->err;
  EXPECT_THAT(second->out, HasSubstr("rank 0 of 2 from step 4"));
  EXPECT_EQ(parameters(second->out), undisturbed());
}

TEST(ElasticProcess, ARankAloneTrainsLikeAnyOther) { EXPECT_EQ(train(1, {}).status, 0); }

}  // namespace
}  // namespace muster::test
