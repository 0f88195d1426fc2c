// Jobs of several launchers. The launchers' hosts are one host here, and meet in a store that the test serves;
// launchers on hosts of their own are in hosts_test.cpp.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/file_text.h"
#include "multiprocess/restarts_fixture.h"
#include "muster/store/store.h"
#include "store/address/host_address.h"
#include "support/temporary_folder.h"

namespace muster::test::restarted_jobs {
namespace {

using ::testing::IsEmpty;

// Launchers that meet in one store.
class Hosts : public Restarts {
 protected:
  Process& start(const Words& options, const Words& behaviour) {
    Words all{"--rdzv", server_->address()};
    all.insert(all.end(), options.begin(), options.end());
    return *launchers_.emplace_back(std::make_unique<Process>(run_of(all, behaviour)));
  }

  std::unique_ptr<StoreServer> server_ = serve_store();
  std::vector<std::unique_ptr<Process>> launchers_;
};

// None of them is given up, however busy the machine is.
class HostsMeet : public Hosts {
 protected:
  Process& start(Words options, const Words& behaviour) {
    options.insert(options.end(), {"--rdzv-patience", "600s"});
    return Hosts::start(options, behaviour);
  }
};

TEST_F(HostsMeet, RanksAreNumberedThroughAllHosts) {
  Process& second = start({"--nnodes", "2", "--node-rank", "1", "-n", "1"}, {"environment"});
  Process& first = start({"--nnodes", "2", "--node-rank", "0", "-n", "2"}, {"environment"});
  EXPECT_EQ(first.finish(), 0) << first.err;
  EXPECT_EQ(second.finish(), 0) << second.err;
  const std::string host = store::host_name();
  for (const int rank : {0, 1})
    EXPECT_THAT(
        first.out,
        AllOf(HasSubstr(text(':', rank, "] RANK=", rank, '\n')),
              HasSubstr(text(':', rank, "] LOCAL_RANK=", rank, '\n')), HasSubstr(text(':', rank, "] WORLD_SIZE=3\n")),
              HasSubstr(text(':', rank, "] LOCAL_WORLD_SIZE=2\n")), HasSubstr(text(':', rank, "] GROUP_RANK=0\n"))));
  EXPECT_EQ(second.out.substr(0, second.out.find(']')), text('[', host.substr(0, host.find('.')), ":2"));
  EXPECT_THAT(second.out,
              AllOf(HasSubstr(":2] RANK=2\n"), HasSubstr(":2] LOCAL_RANK=0\n"), HasSubstr(":2] WORLD_SIZE=3\n"),
                    HasSubstr(":2] GROUP_RANK=1\n"), HasSubstr(":2] GROUP_WORLD_SIZE=2\n")));
  const auto run_id = [](const std::string& out) {
    const auto at = out.find("TORCHELASTIC_RUN_ID=");
    return out.substr(at, out.find('\n', at) - at);
  };
  EXPECT_EQ(run_id(first.out), run_id(second.out));
}

TEST_F(HostsMeet, AFailureOnOneIsTheEndOfAllAndAllSayWhy) {
  const auto error = [](int node) {
    return std::filesystem::temp_directory_path() / text("muster-error-", ::getpid(), "-", node, ".json");
  };
  std::vector<Process*> launchers;
  for (int node = 0; node < 3; ++node)
    launchers.push_back(&start({"--nnodes", "3", "--node-rank", text(node), "-n", "1", "--error-file", error(node)},
                               {"fail-until", "9", "2"}));
  std::vector<nlohmann::json> errors;
  for (int node = 0; node < 3; ++node) {
    Process& launcher = *launchers[static_cast<size_t>(node)];
    EXPECT_EQ(launcher.finish(), 3) << launcher.err;
    EXPECT_THAT(launcher.err,
                AllOf(HasSubstr("rank 2 (pid "), HasSubstr("exited with status 3"), HasSubstr("no luck in attempt 0")));
    std::ifstream in(error(node));
    errors.push_back(nlohmann::json::parse(in, nullptr, false));
    std::filesystem::remove(error(node));
  }
  EXPECT_THAT(launchers[0]->err, HasSubstr(text("on node 2 ('", store::host_name(), "'): rank 2")));
  // The machines' form says the same everywhere, too.
  for (const auto& each : errors) {
    ASSERT_TRUE(each.is_object());
    EXPECT_EQ(each["rank"], 2);
    EXPECT_EQ(each["host"], store::host_name());
    for (const char* const field : {"pid", "signal", "exception", "stack", "last_lines", "last_operations", "status"})
      EXPECT_EQ(each[field], errors[2][field]) << field;
    EXPECT_GT(each["pid"], 0);
    EXPECT_THAT(each["last_lines"].dump(), HasSubstr("no luck in attempt 0"));
  }
}

TEST_F(HostsMeet, TheyStartAgainTogether) {
  Process& first =
      start({"--nnodes", "2", "--node-rank", "0", "-n", "2", "--max-restarts", "3"}, {"fail-until", "2", "2"});
  Process& second =
      start({"--nnodes", "2", "--node-rank", "1", "-n", "2", "--max-restarts", "3"}, {"fail-until", "2", "2"});
  EXPECT_EQ(first.finish(), 0) << first.err;
  EXPECT_EQ(second.finish(), 0) << second.err;
  EXPECT_THAT(first.out, HasSubstr("attempt 2 of rank 1 of 4"));
  EXPECT_THAT(second.out, HasSubstr("attempt 2 of rank 3 of 4"));
}

TEST_F(Hosts, WhoeverDoesNotComeIsTold) {
  Process& alone = start({"--nnodes", "2", "-n", "1", "--rdzv-timeout", "300ms"}, {"nothing"});
  EXPECT_EQ(alone.finish(), 1);
  EXPECT_THAT(alone.err, HasSubstr("1 of 2 agents came within 300 ms"));
}

TEST_F(HostsMeet, ASignalToOneLauncherEndsAll) {
  Process& first = start({"--nnodes", "2", "-n", "1"}, {"wait-for", "/does/not/exist"});
  Process& second = start({"--nnodes", "2", "-n", "1"}, {"wait-for", "/does/not/exist"});
  ASSERT_TRUE(first.read_until("waits on node") && second.read_until("waits on node"));
  first.signal(SIGTERM);
  EXPECT_EQ(first.finish(), 128 + SIGTERM);
  EXPECT_EQ(second.finish(), 128 + SIGTERM);
  EXPECT_THAT(second.err, HasSubstr("the job was ended by SIGTERM"));
}

TEST_F(Hosts, ALauncherThatIsKilledIsMissedAndTheOthersGoOn) {
  const auto file = (std::filesystem::temp_directory_path() / text("muster-hosts-", ::getpid())).string();
  std::filesystem::remove(file);
  const Words options{"--nnodes", "2:3", "-n", "1", "--rdzv-patience", "3s"};
  Process& first = start(options, {"wait-for", file});
  Process& second = start(options, {"wait-for", file});
  Process& third = start(options, {"wait-for", file});
  for (Process* launcher : {&first, &second, &third}) ASSERT_TRUE(launcher->read_until("of 3 waits on node"));
  third.signal(SIGKILL);
  const auto killed = Clock::now();
  const Stolen stolen;
  ASSERT_TRUE(first.read_until("of 2 waits on node") && second.read_until("of 2 waits on node")) << first.err;
  expect_recovered(killed, stolen);
  std::ofstream(file).close();
  EXPECT_EQ(first.finish(), 0) << first.err;
  EXPECT_EQ(second.finish(), 0) << second.err;
  std::filesystem::remove(file);
}

TEST_F(Hosts, OneMoreComesIntoARunningJob) {
  const auto file = (std::filesystem::temp_directory_path() / text("muster-hosts-", ::getpid())).string();
  std::filesystem::remove(file);
  const Words options{"--nnodes", "1:2", "-n", "1"};
  Process& first = start(options, {"wait-for", file});
  ASSERT_TRUE(first.read_until("rank 0 of 1 waits on node 0 of 1")) << first.err;
  Process& second = start({"--nnodes", "1:2", "-n", "1", "--grace", "5s"}, {"wait-for", file});
  ASSERT_TRUE(first.read_until("rank 0 of 2 waits on node 0 of 2")) << first.err;
  ASSERT_TRUE(second.read_until("rank 1 of 2 waits on node 1 of 2")) << second.err;
  std::ofstream(file).close();
  EXPECT_EQ(first.finish(), 0) << first.err;
  EXPECT_EQ(second.finish(), 0) << second.err;
  std::filesystem::remove(file);
}

// An epoch that ends to make room for another host does not count as a restart. Ranks do not see how often a launcher
// has met the others.
TEST_F(Hosts, AllRanksKnowHowOftenTheJobHasStartedAgain) {
  const auto file = (std::filesystem::temp_directory_path() / text("muster-hosts-", ::getpid())).string();
  std::filesystem::remove(file);
  const Words program{"/bin/sh", "-c",
                      text("echo restarts: $TORCHELASTIC_RESTART_COUNT of $WORLD_SIZE; while ! test -e ", file,
                           "; do sleep 0.05; done")};
  const auto run = [&] {
    return launchers_
        .emplace_back(std::make_unique<Process>(
            run_program({"--rdzv", server_->address(), "--nnodes", "1:2", "-n", "1"}, program)))
        .get();
  };
  Process* const first = run();
  ASSERT_TRUE(first->read_until("restarts: 0 of 1")) << first->err;
  Process* const second = run();
  EXPECT_TRUE(first->read_until("restarts: 0 of 2")) << first->out << first->err;
  EXPECT_TRUE(second->read_until("restarts: 0 of 2")) << second->out << second->err;
  std::ofstream(file).close();
  for (Process* launcher : {first, second}) EXPECT_EQ(launcher->finish(), 0) << launcher->err;
  std::filesystem::remove(file);
}

// Ranks that end well because they were asked to make room are not done.
TEST_F(Hosts, OneMoreDoesNotEndAJobWhoseRanksEndWellWhenTheyAreAskedTo) {
  const Words options{"--nnodes", "1:2", "-n", "1"};
  Process& first = start(options, {"signals", "well"});
  ASSERT_TRUE(first.read_until("ready")) << first.err;
  Process& second = start(options, {"signals", "well"});
  ASSERT_TRUE(second.read_until("ready")) << second.err;  // both are, since they meet before
  ASSERT_TRUE(first.read_until(":0] got TERM")) << first.err;
  first.signal(SIGTERM);
  for (Process* launcher : {&first, &second}) EXPECT_EQ(launcher->finish(), 0) << launcher->err;
}

TEST_F(Hosts, AStopIsFinalOnAllOfThem) {
  const Words options{"--nnodes", "2", "-n", "1", "--max-restarts", "9"};
  Process& first = start(options, {"wait-for", "/does/not/exist"});
  Process& second = start(options, {"wait-for", "/does/not/exist"});
  ASSERT_TRUE(first.read_until("waits on node") && second.read_until("waits on node"));
  second.signal(SIGTERM);
  for (Process* launcher : {&first, &second}) {
    EXPECT_EQ(launcher->finish(), 128 + SIGTERM);
    EXPECT_THAT(launcher->err, AllOf(HasSubstr("ended by SIGTERM"), Not(HasSubstr("again"))));
  }
}

// The time for which a process has had a processor.
double seconds_of_work(pid_t pid) {
  std::ifstream file(text("/proc/", pid, "/stat"));
  std::string word;
  double user = 0, system = 0;
  for (int field = 1; field < 14; ++field) file >> word;  // its name has no blank
  file >> user >> system;
  return (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

// Of three, one is lost; the others wait for another in its place.
TEST_F(Hosts, AStopWhileTheyMeetAgainIsFinalOnAllOfThem) {
  const Words options{"--nnodes", "3", "-n", "1", "--max-restarts", "9", "--rdzv-patience", "2s"};
  for (int i = 0; i < 3; ++i) start(options, {"wait-for", "/does/not/exist"});
  for (const auto& launcher : launchers_) ASSERT_TRUE(launcher->read_until("waits on node")) << launcher->err;
  Process &first = *launchers_[0], &second = *launchers_[1];
  launchers_[2]->signal(SIGKILL);
  for (Process* launcher : {&first, &second})
    while (launcher->err.find("starts again (1 of 9)") == std::string::npos)
      ASSERT_TRUE(launcher->read_some_more()) << launcher->err;
  const double before = seconds_of_work(first.pid());
  EXPECT_EQ(first.wait(Deadline::after(seconds(3))), -1) << "two are not three";
  EXPECT_LT(seconds_of_work(first.pid()) - before, 0.6) << "it does not wait but asks and asks";
  first.signal(SIGTERM);
  for (Process* launcher : {&first, &second}) {
    EXPECT_EQ(launcher->finish(), 128 + SIGTERM) << launcher->err;
    EXPECT_THAT(launcher->err, HasSubstr("ended by SIGTERM"));
  }
}

TEST_F(Hosts, ASignalToOneIsForwardedToTheRanksOfAll) {
  const Words options{"--nnodes", "2", "-n", "1"};
  Process& first = start(options, {"signals", "well"});
  Process& second = start(options, {"signals", "well"});
  ASSERT_TRUE(first.read_until("ready") && second.read_until("ready"));
  first.signal(SIGTERM);
  for (Process* launcher : {&first, &second}) {
    EXPECT_EQ(launcher->finish(), 0) << launcher->err;
    EXPECT_THAT(launcher->out, HasSubstr("got TERM"));
  }
}

// A scheduler sends one to each launcher, and not in the same moment.
TEST_F(HostsMeet, ASignalToEachLauncherIsNoSecondOne) {
  const Words options{"--nnodes", "2", "-n", "1", "--stop-grace", "600s"};
  Process& first = start(options, {"signals", "stubborn"});
  Process& second = start(options, {"signals", "stubborn"});
  ASSERT_TRUE(first.read_until("ready") && second.read_until("ready"));
  first.signal(SIGTERM);
  ASSERT_TRUE(second.read_until("got TERM")) << second.err;
  second.signal(SIGTERM);
  ASSERT_TRUE(has_taken(second.pid(), SIGTERM));
  second.signal(SIGUSR1);
  ASSERT_TRUE(second.read_until("got USR1")) << second.err;  // it lives
  for (Process* launcher : {&first, &second}) launcher->signal(SIGUSR2);
  for (Process* launcher : {&first, &second}) EXPECT_EQ(launcher->finish(), 0) << launcher->err;
}

// All ranks of one host save and end well; those of the other are killed before they have.
TEST_F(HostsMeet, AStopThatKillsRanksOfOneHostIsWellOnNone) {
  Process& first = start({"--nnodes", "2", "-n", "1"}, {"signals", "well"});
  Process& second = start({"--nnodes", "2", "-n", "1", "--stop-grace", "200ms"}, {"signals", "stubborn"});
  ASSERT_TRUE(first.read_until("ready") && second.read_until("ready"));
  first.signal(SIGTERM);
  for (Process* launcher : {&first, &second}) {
    EXPECT_EQ(launcher->finish(), 128 + SIGTERM) << launcher->err;
    EXPECT_THAT(launcher->err, HasSubstr("had not ended 200 ms later and was killed"));
  }
  EXPECT_THAT(first.err, HasSubstr("on node "));
}

// In a folder that hosts share, a rank's number may have been another host's: its last words stay.
TEST_F(HostsMeet, ALogOfAnEarlierEpochIsKept) {
  const TemporaryFolder folder;
  const auto file = (folder / "go").string();
  const Words options{"--nnodes", "1:2", "-n", "1", "--log-dir", folder.path().string()};
  std::ofstream(folder / "rank_0.out") << "of a job before\n";
  Process& first = start(options, {"wait-for", file});
  ASSERT_TRUE(first.read_until("of 1 waits on node")) << first.err;
  std::ofstream(folder / "rank_1.out") << "last words\n";
  Process& second = start(options, {"wait-for", file});
  ASSERT_TRUE(second.read_until("of 2 waits on node")) << second.err;
  std::ofstream(file).close();
  for (Process* launcher : {&first, &second}) EXPECT_EQ(launcher->finish(), 0) << launcher->err;
  EXPECT_THAT(text_of_file(folder / "rank_0.out"), Not(HasSubstr("of a job before")));  // emptied when the job began
  EXPECT_THAT(text_of_file(folder / "rank_1.out"), HasSubstr("last words\n"));
}

TEST_F(Hosts, AProgramThatOneOfThemLacksIsTheEndOfAll) {
  const auto program = std::filesystem::temp_directory_path() / text("muster-no-program-", ::getpid());
  std::ofstream(program) << "nothing to run\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  Process& first = start({"--nnodes", "2", "-n", "1", "--max-restarts", "9"}, {"wait-for", "/does/not/exist"});
  Process second({kMusterCommand, "run", "--rdzv", server_->address(), "--nnodes", "2", "-n", "1", "--max-restarts",
                  "9", program.string()});
  EXPECT_EQ(second.finish(), 2);
  EXPECT_NE(first.finish(), 0);
  EXPECT_THAT(first.err, AllOf(HasSubstr("cannot be started"), Not(HasSubstr("starts again"))));
  std::filesystem::remove(program);
}

TEST_F(Hosts, OneThatStoodStillIsMissedAndSaysSo) {
  const Words options{"--nnodes", "2", "-n", "1", "--rdzv-patience", "2s"};
  Process& first = start(options, {"wait-for", "/does/not/exist"});
  Process& second = start(options, {"wait-for", "/does/not/exist"});
  ASSERT_TRUE(first.read_until("waits on node") && second.read_until("waits on node"));
  second.signal(SIGSTOP);
  EXPECT_EQ(first.finish(), 1);
  EXPECT_THAT(first.err, HasSubstr("gave no sign of life"));
  second.signal(SIGCONT);
  EXPECT_EQ(second.finish(), 1);
  EXPECT_THAT(second.err, HasSubstr("gave no sign of life"));
}

TEST_F(Hosts, WhoeverGaveUpWaitingLeavesNoSeatTaken) {
  Process& gone = start({"--nnodes", "2", "-n", "1", "--rdzv-timeout", "200ms"}, {"nothing"});
  EXPECT_EQ(gone.finish(), 1);
  Process& killed = start({"--nnodes", "2", "-n", "1"}, {"nothing"});
  EXPECT_EQ(killed.wait(Deadline::after(milliseconds(300))), -1) << "one alone is not two";
  killed.signal(SIGKILL);
  killed.wait();
  Process& first = start({"--nnodes", "2", "-n", "1"}, {"fail-until", "0", "0"});
  Process& second = start({"--nnodes", "2", "-n", "1"}, {"fail-until", "0", "0"});
  EXPECT_EQ(first.finish(), 0) << first.err;
  EXPECT_EQ(second.finish(), 0) << second.err;
  EXPECT_THAT(first.out + second.out, AllOf(HasSubstr("rank 0 of 2"), HasSubstr("rank 1 of 2")));
}

TEST_F(Hosts, ASpareEndsWithTheJob) {
  const auto file = (std::filesystem::temp_directory_path() / text("muster-hosts-", ::getpid())).string();
  std::filesystem::remove(file);
  const Words options{"--nnodes", "1:2", "-n", "1"};
  Process& first = start(options, {"wait-for", file});
  Process& second = start(options, {"wait-for", file});
  ASSERT_TRUE(first.read_until("of 2 waits on node") && second.read_until("of 2 waits on node"));
  Process& spare = start(options, {"wait-for", file});
  EXPECT_EQ(spare.wait(Deadline::after(milliseconds(700))), -1) << "it waits for a place";
  std::ofstream(file).close();
  for (Process* launcher : {&first, &second, &spare}) EXPECT_EQ(launcher->finish(), 0) << launcher->err;
  EXPECT_THAT(spare.out, IsEmpty());
  EXPECT_THAT(spare.err, HasSubstr("the job has ended without this host"));
  std::filesystem::remove(file);
}

TEST_F(Hosts, ASpareOfAJobThatFailsSaysWhy) {
  const auto file = (std::filesystem::temp_directory_path() / text("muster-hosts-", ::getpid())).string();
  std::filesystem::remove(file);
  const Words options{"--nnodes", "1", "-n", "1"};
  Process& only = start(options, {"wait-for", file, "0"});
  ASSERT_TRUE(only.read_until("of 1 waits on node")) << only.err;
  Process& spare = start(options, {"wait-for", file, "0"});
  EXPECT_EQ(spare.wait(Deadline::after(milliseconds(700))), -1) << "it waits for a place";
  std::ofstream(file).close();
  for (Process* launcher : {&only, &spare}) EXPECT_EQ(launcher->finish(), 3) << launcher->err;
  EXPECT_THAT(spare.err, AllOf(HasSubstr("the job has ended without this host"),
                               HasSubstr(text("on node 0 ('", store::host_name(), "'): rank 0 (pid "))));
  std::filesystem::remove(file);
}

// It comes when the ranks have ended, and the launcher has not noticed yet.
TEST_F(Hosts, WhoeverComesWhenTheRanksHaveJustEndedIsToldSo) {
  const auto file = (std::filesystem::temp_directory_path() / text("muster-hosts-", ::getpid())).string();
  std::filesystem::remove(file);
  const Words options{"--nnodes", "1:2", "-n", "1"};
  Process& first = start(options, {"wait-for", file});
  ASSERT_TRUE(first.read_until("rank 0 of 1 waits on node 0 of 1")) << first.err;
  const auto children = children_of(first.pid());  // the rank, and the guardian
  first.signal(SIGSTOP);
  std::ofstream(file).close();
  const auto one_ended = [&] {
    return std::any_of(children.begin(), children.end(), [](pid_t child) { return state_of(child) == 'Z'; });
  };
  for (const auto patience = Deadline::after(kPatience); !one_ended();) {
    ASSERT_FALSE(patience.passed());
    ::poll(nullptr, 0, 1);
  }
  Process& late = start({"--nnodes", "1:2", "-n", "1", "--grace", "20s"}, {"wait-for", file});
  server_->local()->get("agents/0/end", Deadline::after(kPatience));  // which makes room for it
  first.signal(SIGCONT);
  EXPECT_EQ(first.finish(), 0) << first.err;
  EXPECT_EQ(late.finish(), 0) << late.err;
  EXPECT_EQ(first.out.find("waits on node"), first.out.rfind("waits on node")) << "it ran once more: " << first.out;
  EXPECT_EQ(first.err, "");
  EXPECT_THAT(late.out, IsEmpty());
  EXPECT_THAT(late.err, HasSubstr("the job has ended without this host"));
  std::filesystem::remove(file);
}

TEST_F(Hosts, WithoutTheirStoreTheyEnd) {
  const Words options{"--nnodes", "2", "-n", "1"};
  Process& first = start(options, {"wait-for", "/does/not/exist"});
  Process& second = start(options, {"wait-for", "/does/not/exist"});
  ASSERT_TRUE(first.read_until("waits on node") && second.read_until("waits on node"));
  server_.reset();
  for (Process* launcher : {&first, &second}) {
    EXPECT_EQ(launcher->finish(), 1);
    EXPECT_THAT(launcher->err, HasSubstr("the hosts cannot go on together"));
  }
}

}  // namespace
}  // namespace muster::test::restarted_jobs
