// launch_function(): ranks forked from this very process, which stays as it was; and the choice among several failures.
#include <gmock/gmock.h>
#include <sys/prctl.h>

#include <thread>

#include "launch/ranks/outcome.h"
#include "multiprocess/launch_support.h"
#include "muster/base/error.h"
#include "muster/launch/launcher.h"
#include "muster/store/store.h"
#include "shm/black_box.h"

namespace muster::test {
namespace {

using launch::choose_cause;
using launch::Failure;
using launch::LastLines;
using launch::launch_function;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::UnorderedElementsAre;

int rank() { return std::atoi(std::getenv("RANK")); }

int stay() {
  ::poll(nullptr, 0, 60'000);
  return 99;
}

// All ranks have come here when it returns.
std::shared_ptr<Store> meet() {
  auto store = connect_store(std::getenv("MUSTER_STORE"), patience());
  store->set(text("here/", rank()), "");
  for (int other = 0; other < std::atoi(std::getenv("WORLD_SIZE")); ++other)
    store->wait({text("here/", other)}, patience());
  return store;
}

class LaunchFunction : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_TRUE(children_of(::getpid()).empty()) << "the job left processes behind"; }
};

TEST_F(LaunchFunction, RunsEveryRankWithTheStore) {
  const int before = 41;
  const auto outcome = launch_function(5, [&] {
    auto store = meet();
    return before == 41 && store->add("sum", rank()) >= 0 && std::getenv("MUSTER_JOB_ID") ? 0 : 1;
  });
  EXPECT_EQ(outcome.status, 0) << outcome.cause;
  EXPECT_EQ(outcome.first_failed_rank, -1);
  EXPECT_EQ(outcome.cause, "");
  EXPECT_EQ(std::getenv("MUSTER_STORE"), nullptr) << "this process's environment is its own";
}

TEST_F(LaunchFunction, GivesTheStatusAndLastLinesOfTheFirstThatFails) {
  const auto outcome = launch_function(3, [] {
    meet();
    if (rank() != 2) return stay();
    std::fprintf(stderr, "a reason\n");
    return 9;
  });
  EXPECT_EQ(outcome.status, 9);
  EXPECT_EQ(outcome.first_failed_rank, 2);
  EXPECT_GT(outcome.pid, 0);
  EXPECT_THAT(outcome.last_lines, ElementsAre("a reason"));
  EXPECT_THAT(outcome.cause, MatchesRegex("rank 2 \\(pid [0-9]+\\) exited with status 9\n.*\n  \\| a reason\n"));
}

TEST_F(LaunchFunction, NamesAnExceptionThatEscapes) {
  const auto outcome = launch_function(2, []() -> int {
    meet();
    if (rank() == 1) throw InvalidArgument("a tensor is sparse", "Make it dense");
    return stay();
  });
  EXPECT_EQ(outcome.status, 1);
  EXPECT_EQ(outcome.first_failed_rank, 1);
  EXPECT_EQ(outcome.exception_type, "muster::InvalidArgument");
  EXPECT_EQ(outcome.exception_text, "a tensor is sparse. Make it dense");

  const auto other = launch_function(1, []() -> int { throw 3; });
  EXPECT_EQ(other.status, 1);
  EXPECT_EQ(other.exception_type, "int");
}

TEST_F(LaunchFunction, NamesASignal) {
  const auto outcome = launch_function(2, [] {
    meet();
    if (rank() == 0) ::raise(SIGKILL);
    return stay();
  });
  EXPECT_EQ(outcome.status, 128 + SIGKILL);
  EXPECT_EQ(outcome.signal, SIGKILL);
  EXPECT_EQ(outcome.first_failed_rank, 0);
}

TEST_F(LaunchFunction, GivesTheLastOperationsOfTheFirstThatFails) {
  const auto outcome = launch_function(2, [] {
    const auto box = shm::open_black_box(rank(), 2);
    const int world = box->group("world");
    if (rank() == 1)
      for (uint64_t i = 0; i < 9; ++i) {
        const auto ticket = box->begin({.group = world, .operation = 4, .bytes = 16, .sequence = i});
        if (i != 2) box->end(ticket, shm::BlackBoxState::kDone);
      }
    meet();
    if (rank() == 1) ::raise(SIGKILL);
    return stay();
  });
  EXPECT_EQ(outcome.signal, SIGKILL);
  EXPECT_THAT(outcome.last_operations,
              ElementsAre(MatchesRegex("operation 4 #2 of group 'world', 16 B, running for .*"),
                          MatchesRegex("operation 4 #7 of group 'world', 16 B, done .* ago"),
                          MatchesRegex("operation 4 #8 of group 'world', 16 B, done .* ago")));
  EXPECT_THAT(outcome.cause,
              HasSubstr("  its last operations:\n  | operation 4 #2 of group 'world', 16 B, running for "));
}

TEST_F(LaunchFunction, ChangesNothingInThisProcess) {
  sigset_t mask_before, mask_after;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &mask_before);
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
  const auto descriptors = [] {
    int count = 0;
    for (int fd = 0; fd < 1024; ++fd) count += ::fcntl(fd, F_GETFD) >= 0;
    return count;
  };
  const int descriptors_before = descriptors();
  struct sigaction before[NSIG], after{};
  for (int signal = 1; signal < NSIG; ++signal) ::sigaction(signal, nullptr, &before[signal]);

  int descriptors_of_rank = 0;
  const auto outcome = launch_function(3, [&] {
    descriptors_of_rank = descriptors();
    struct sigaction mine {};
    sigset_t mask;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    if (descriptors_of_rank != descriptors_before + 1) return 10;  // its black box
    if (::sigismember(&mask, SIGPIPE) != ::sigismember(&mask_before, SIGPIPE)) return 11;
    ::sigaction(SIGPIPE, nullptr, &mine);
    return mine.sa_handler == before[SIGPIPE].sa_handler ? 0 : 12;
  });
  EXPECT_EQ(outcome.status, 0) << outcome.cause << "10: descriptors, 11: mask, 12: handlers";

  for (int signal = 1; signal < NSIG; ++signal)
    if (::sigaction(signal, nullptr, &after) == 0) {
      EXPECT_EQ(after.sa_handler, before[signal].sa_handler);
    }
  ::pthread_sigmask(SIG_SETMASK, nullptr, &mask_after);
  for (int signal = 1; signal < NSIG; ++signal)
    EXPECT_EQ(::sigismember(&mask_after, signal), ::sigismember(&mask_before, signal)) << signal;
  int subreaper = -1;
  ::prctl(PR_GET_CHILD_SUBREAPER, &subreaper);
  EXPECT_EQ(subreaper, 0);
  EXPECT_EQ(descriptors(), descriptors_before);
}

TEST_F(LaunchFunction, RunsInSeveralThreadsAtOnce) {
  std::vector<int> statuses(4, -1);
  std::vector<std::thread> threads;
  for (int job = 0; job < 4; ++job)
    threads.emplace_back([&, job] {
      statuses[static_cast<size_t>(job)] =
          launch_function(2, [&] { return meet() && rank() == 1 ? 20 + job : 0; }).status;
    });
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(statuses, ElementsAre(20, 21, 22, 23));
}

TEST_F(LaunchFunction, OutputIsNotDuplicatedAndMayHavePrefixes) {
  Process plain({kLaunchProgram, "function", "plain"}), prefixed({kLaunchProgram, "function", "prefixed"});
  EXPECT_EQ(plain.finish(), 0);
  EXPECT_THAT(plain.out, ::testing::StartsWith("before"));
  EXPECT_THAT(lines_of(plain.out.substr(6)), UnorderedElementsAre("out of 0", "out of 1", "after"));
  EXPECT_THAT(lines_of(plain.err), UnorderedElementsAre("err of 0", "err of 1"));
  EXPECT_EQ(prefixed.finish(), 0);
  EXPECT_THAT(lines_of(prefixed.out.substr(6)), UnorderedElementsAre("[0] out of 0", "[1] out of 1", "after"));
  EXPECT_THAT(lines_of(prefixed.err), UnorderedElementsAre("[0] err of 0", "[1] err of 1"));
}

TEST_F(LaunchFunction, RanksDieWithThisProcess) {
  Process program({kLaunchProgram, "function", "stay"});
  ASSERT_TRUE(program.read_until("ready"));
  program.signal(SIGKILL);
  EXPECT_EQ(program.wait(), 1000 + SIGKILL);
  EXPECT_THAT(processes_left(patience()), IsEmpty());
}

TEST_F(LaunchFunction, RefusesWhatCannotWork) {
  const auto nothing = [] { return 0; };
  EXPECT_THROW(launch_function(0, nothing), InvalidArgument);
  EXPECT_THROW(launch_function(launch::kMaxRanks + 1, nothing), InvalidArgument);
  EXPECT_THROW(launch_function(1, {}), InvalidArgument);
  EXPECT_THROW(launch_function(1, nothing, {.grace = milliseconds(-1)}), InvalidArgument);
  EXPECT_THROW(launch_function(1, nothing, {.settle = milliseconds(-1)}), InvalidArgument);
  EXPECT_THROW(launch_function(1, nothing, {.settle = milliseconds::max()}), InvalidArgument);
  EXPECT_THROW(launch_function(1, nothing, {.env = {{"A=B", "c"}}}), InvalidArgument);
  ::signal(SIGCHLD, SIG_IGN);
  EXPECT_THROW(launch_function(1, nothing), InvalidArgument);
  ::signal(SIGCHLD, SIG_DFL);
}

class RootCause : public ::testing::Test {
 protected:
  RootCause() {
    peer_lost_.feed("terminate called after throwing an instance of 'muster::PeerLost'\n  what():  rank 1 is gone\n");
    unnamed_.feed(
        "terminate called after throwing an instance of 'muster::Unavailable'\n  what():  the connections of group "
        "'world' broke in all_reduce #3: closed. Which rank is lost is not known: no etcd\n");
    aborted_.feed("terminate called after throwing an instance of 'muster::Aborted'\n");
    other_.feed("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n");
  }
  static Failure at(int ms, int rank, int signal, const LastLines& lines) {
    return {.rank = rank,
            .exit_status = 1,
            .signal = signal,
            .when = Clock::time_point(milliseconds(1000 + ms)),
            .last_lines = &lines};
  }
  static Failure cause_of(const std::vector<Failure>& failures) {
    return choose_cause(failures, milliseconds(50), milliseconds(50));
  }
  LastLines peer_lost_, unnamed_, aborted_, other_, silent_;
};

TEST_F(RootCause, IsTheFirstOfEqualOnes) {
  EXPECT_EQ(cause_of({at(0, 4, 0, silent_), at(1, 2, 0, silent_)}).rank, 4);
  EXPECT_EQ(cause_of({at(0, 4, SIGABRT, other_), at(1, 2, SIGSEGV, silent_)}).rank, 4);
}

TEST_F(RootCause, IsADeathBySignalBeforeAnExit) {
  EXPECT_EQ(cause_of({at(0, 4, 0, silent_), at(20, 2, SIGKILL, silent_)}).rank, 2);
  EXPECT_EQ(cause_of({at(0, 4, 0, silent_), at(51, 2, SIGKILL, silent_)}).rank, 4) << "too late";
}

TEST_F(RootCause, IsAConsequenceOnlyWhereThereIsNothingElse) {
  EXPECT_EQ(cause_of({at(0, 0, SIGABRT, peer_lost_), at(9, 1, SIGABRT, aborted_), at(10, 2, 0, silent_)}).rank, 2);
  EXPECT_EQ(cause_of({at(0, 0, SIGABRT, peer_lost_), at(9, 1, SIGABRT, aborted_)}).rank, 0);
  EXPECT_EQ(cause_of({at(0, 0, SIGABRT, peer_lost_), at(99, 2, 0, silent_)}).rank, 0) << "too late";
}

TEST_F(RootCause, IsNoLossThatASilentStoreCouldNotName) {
  EXPECT_EQ(cause_of({at(0, 0, SIGABRT, unnamed_), at(10, 1, 0, silent_)}).rank, 1);
  EXPECT_TRUE(at(0, 0, SIGABRT, unnamed_).is_consequence());
}

TEST(LastLines, AreBoundedAndKnowBars) {
  LastLines lines;
  for (int i = 0; i < 100; ++i) lines.feed(text("line ", i, '\n'));
  lines.feed("10%\r20%\r\n");
  lines.feed(std::string(5000, 'x'));
  lines.finish();
  ASSERT_EQ(lines.lines().size(), LastLines::kMaxLines);
  EXPECT_EQ(lines.lines().front(), "line 82");
  EXPECT_EQ(lines.lines()[18], "20%");
  EXPECT_EQ(lines.lines().back(), std::string(LastLines::kMaxLineBytes, 'x') + "…");
}

TEST(LastLines, FindAnExceptionInAnyPieces) {
  const std::string bytes =
      "terminate called after throwing an instance of 'a::b<char, 'c'>'\n  what():  what(): 'it'\n\n";
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    LastLines lines;
    lines.feed(std::string_view(bytes).substr(0, cut));
    lines.feed(std::string_view(bytes).substr(cut));
    EXPECT_EQ(lines.exception_type(), "a::b<char, 'c'>");
    EXPECT_EQ(lines.exception_text(), "what(): 'it'");
  }
}

}  // namespace
}  // namespace muster::test
