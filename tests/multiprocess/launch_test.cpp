// muster run as its users meet it: started as a program, watched from outside. Its output is in launch_output_test.cpp.
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>

#include "base/cores.h"
#include "multiprocess/launch_fixture.h"

namespace muster::test::launched_jobs {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::IsEmpty;
using ::testing::StartsWith;

class LaunchFolder : public JobFolderTest {};

TEST_F(Launch, RanksGetTheVariablesOfTheJob) {
  ::unsetenv("MALLOC_TRIM_THRESHOLD_");  // ./dev test sets it
  Process job(run_of({"-n", "3"}, {"environment"}),
              {.env = {"OMP_NUM_THREADS=7", "MALLOC_MMAP_THRESHOLD_=4096", "MUSTER_TERMINAL=1", "MINE=yes"}});
  ASSERT_EQ(job.finish(), 0) << job.err;
  std::map<std::string, std::map<std::string, std::string>> ranks;
  for (const auto& line : lines_of(job.out)) {
    const auto equals = line.find('=');
    if (equals != std::string::npos) ranks[line.substr(0, 3)][line.substr(4, equals - 4)] = line.substr(equals + 1);
  }
  ASSERT_EQ(ranks.size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    auto& env = ranks[text('[', rank, ']')];
    for (const char* name : {"RANK", "LOCAL_RANK", "ROLE_RANK"}) EXPECT_EQ(env[name], text(rank)) << name;
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"}) EXPECT_EQ(env[name], "3") << name;
    for (const char* name : {"GROUP_RANK", "NODE_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"})
      EXPECT_EQ(env[name], "0") << name;
    EXPECT_EQ(env["GROUP_WORLD_SIZE"], "1");
    EXPECT_EQ(env["ROLE_NAME"], "default");
    EXPECT_EQ(env["MASTER_ADDR"], "127.0.0.1");
    EXPECT_GT(std::stoi(env["MASTER_PORT"]), 1023);
    EXPECT_THAT(env["MUSTER_STORE"], StartsWith("unix:@muster-"));
    EXPECT_EQ(env["MUSTER_JOB_ID"].size(), 32u);
    EXPECT_EQ(env["MUSTER_JOB_ID"], ranks["[0]"]["MUSTER_JOB_ID"]);
    EXPECT_EQ(env["TORCHELASTIC_RUN_ID"], env["MUSTER_JOB_ID"]);
    EXPECT_EQ(env["OMP_NUM_THREADS"], "7") << "the user's choice";
    EXPECT_EQ(env["MALLOC_MMAP_THRESHOLD_"], "4096") << "the user's choice";
    EXPECT_EQ(env["MALLOC_TRIM_THRESHOLD_"], "1073741824");
    EXPECT_EQ(env["MINE"], "yes");
    EXPECT_EQ(env.count("MUSTER_TERMINAL"), 0u) << "of a job around this one";
  }
}

TEST_F(Launch, ThreadsAreSharedOutAmongTheRanks) {
  std::vector<std::string> processors;
  const CpuSet own = own_cpus();
  for (size_t cpu = 0; cpu < own.size() && processors.size() < 4; ++cpu)
    if (own[cpu]) processors.push_back(text(cpu));
  for (int cores = 1; cores <= static_cast<int>(processors.size()); ++cores)
    for (int ranks = 1; ranks <= cores + 1; ++ranks) {
      const Words some(processors.begin(), processors.begin() + cores);
      Process job({"/usr/bin/env", "-u", "OMP_NUM_THREADS", "taskset", "-c", join(some, ","), kMusterCommand, "run",
                   "--pin", "none", "-n", text(ranks), kLaunchProgram, "environment"});
      ASSERT_EQ(job.finish(), 0) << job.err;
      const int usable = std::min(cores, static_cast<int>(cpu_quota() + 0.5));
      for (int rank = 0; rank < ranks; ++rank)
        EXPECT_THAT(job.out, HasSubstr(text('[', rank, "] OMP_NUM_THREADS=", std::max(1, usable / ranks), '\n')))
            << "on processors " << join(some);
    }
}

TEST_F(Launch, ExitStatusIsThatOfTheFirstRankThatFails) {
  for (const int status : {1, 3, 255}) {
    Process job(run_of({"-n", "3"}, {"fail", "1", text(status)}));
    EXPECT_EQ(job.finish(), status);
    EXPECT_THAT(job.err, HasSubstr(text("exited with status ", status)));
  }
}

TEST_F(Launch, TheCauseComesLastWithTheRanksLastLines) {
  Process job(run_of({"-n", "3"}, {"fail", "2", "3"}));
  EXPECT_EQ(job.finish(), 3);
  std::string tail;
  for (int line = 10; line < 30; ++line) tail += text("  | trouble ", line, '\n');
  const auto report = job.err.substr(job.err.find("muster: "));
  EXPECT_THAT(report, ContainsRegex("^muster: rank 2 \\(pid [0-9]+\\) exited with status 3\n"));
  EXPECT_THAT(report, EndsWith("  its last lines on standard error:\n" + tail));
  EXPECT_THAT(report, Not(HasSubstr("trouble 9")));
}

TEST_F(Launch, AnUncaughtExceptionIsNamed) {
  Process job(run_of({"-n", "2"}, {"throw", "1"}));
  EXPECT_EQ(job.finish(), 128 + SIGABRT);
  EXPECT_THAT(job.err, ContainsRegex("\nmuster: rank 1 \\(pid [0-9]+\\) killed by SIGABRT \\(6\\): it ended itself.*\n"
                                     "  exception std::runtime_error: the disk is full\n"));
}

TEST_F(Launch, ASignalIsNamedAndExplained) {
  const std::pair<int, const char*> cases[] = {{SIGSEGV, "killed by SIGSEGV \\(11\\): .*memory that is not its own"},
                                               {SIGKILL, "killed by SIGKILL \\(9\\): .*out of memory"},
                                               {SIGABRT, "killed by SIGABRT \\(6\\): it ended itself"},
                                               {SIGTERM, "killed by SIGTERM \\(15\\): somebody ended this rank alone"}};
  for (const auto& [signal, words] : cases) {
    Process job(run_of({"-n", "3"}, {"die", "1", text(signal)}));
    EXPECT_EQ(job.finish(), 128 + signal);
    EXPECT_THAT(job.err, ContainsRegex(text("^muster: rank 1 \\(pid [0-9]+\\) ", words)));
  }
}

TEST_F(Launch, ARankThatOnlyLostItsPeerIsNotTheCause) {
  Process job(run_of({"-n", "2", "--settle", "600s"}, {"echo-first"}));
  EXPECT_EQ(job.finish(), 7);
  EXPECT_THAT(job.err, ContainsRegex("\nmuster: rank 1 \\(pid [0-9]+\\) exited with status 7"));
}

TEST_F(LaunchFolder, WithKeepGoingOnlyRank0EndsTheJob) {
  const std::string gate = path("gate");
  ASSERT_EQ(::mkfifo(gate.c_str(), 0600), 0);
  const std::string script = "case $RANK in 0) cat " + gate + "; exit $1;; 1) kill -9 $$;; 2) exit 3;; esac";
  for (const int status : {0, 7}) {
    Process job(run_program({"-n", "4", "--keep-going"}, {"sh", "-c", script, "sh", text(status)}), {.one_pipe = true});
    ASSERT_TRUE(job.read_until("muster: the others go on without rank 1\n")) << job.out;
    ASSERT_TRUE(job.read_until("muster: the others go on without rank 2\n")) << job.out;
    std::ofstream(gate) << "rank 0 is still there\n";
    EXPECT_EQ(job.finish(), status);
    EXPECT_THAT(job.out, HasSubstr("rank 0 is still there\n"));
    EXPECT_THAT(job.out, ContainsRegex("muster: rank 1 \\(pid [0-9]+\\) killed by SIGKILL"));
    EXPECT_THAT(job.out, ContainsRegex("muster: rank 2 \\(pid [0-9]+\\) exited with status 3"));
  }
}

// Left to themselves, the others would stay longer than the test waits.
TEST_F(Launch, TheOthersAreEnded) {
  for (const auto& [behaviour, grace] : {std::pair(Words{"fail", "0", "3"}, "600s"),                 // by SIGTERM
                                         std::pair(Words{"fail", "0", "3", "stubborn"}, "50ms")}) {  // by SIGKILL
    Process job(run_of({"-n", "3", "--grace", grace}, behaviour));
    EXPECT_EQ(job.finish(), 3);
    EXPECT_THAT(job.err, ContainsRegex("muster: rank 0 \\(pid [0-9]+\\) exited with status 3"));
  }
}

TEST_F(Launch, StopSignalsAreForwardedAndGiveTheStatus) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    Process job(run_of({"-n", "2"}, {"signals"}));
    ASSERT_TRUE(job.read_until("[0] ready") && job.read_until("[1] ready")) << job.err;
    job.signal(signal);
    EXPECT_EQ(job.finish(), 128 + signal);
    for (const int rank : {0, 1})
      EXPECT_THAT(job.out, HasSubstr(text('[', rank, "] got ", ::sigabbrev_np(signal), '\n')));
    EXPECT_EQ(job.err, text("muster: the job was ended by SIG", ::sigabbrev_np(signal), " (", signal, ")\n"));
  }
}

TEST_F(Launch, RanksThatEndWellUponAStopSignalMakeAJobThatDid) {
  Process job(run_of({"-n", "2"}, {"signals", "well"}));
  ASSERT_TRUE(job.read_until("[0] ready") && job.read_until("[1] ready")) << job.err;
  job.signal(SIGTERM);
  EXPECT_EQ(job.finish(), 0);
  EXPECT_EQ(job.err, "");
}

TEST_F(Launch, UserSignalsAreForwardedAndEndNothing) {
  Process job(run_of({"-n", "2"}, {"signals"}));
  ASSERT_TRUE(job.read_until("[0] ready") && job.read_until("[1] ready")) << job.err;
  job.signal(SIGUSR1);
  ASSERT_TRUE(job.read_until("[0] got USR1") && job.read_until("[1] got USR1"));
  job.signal(SIGUSR2);
  EXPECT_EQ(job.finish(), 0) << job.err;
}

TEST_F(Launch, ASecondStopSignalKillsAtOnce) {
  Process job(run_of({"-n", "2", "--stop-grace", "600s"}, {"signals", "stubborn"}));
  ASSERT_TRUE(job.read_until("[0] ready") && job.read_until("[1] ready")) << job.err;
  job.signal(SIGINT);
  ASSERT_TRUE(job.read_until("[0] got INT") && job.read_until("[1] got INT"));
  job.signal(SIGINT);
  EXPECT_EQ(job.finish(), 128 + SIGINT);
}

// A terminal that goes may send two, and systemd sends one beside SIGTERM.
TEST_F(Launch, SighupIsNoSecondStopSignal) {
  for (const int first : {SIGHUP, SIGTERM}) {
    Process job(run_of({"-n", "2", "--stop-grace", "600s"}, {"signals", "stubborn"}));
    const std::string name = ::sigabbrev_np(first);
    ASSERT_TRUE(job.read_until("[0] ready") && job.read_until("[1] ready")) << job.err;
    job.signal(first);
    ASSERT_TRUE(job.read_until("[0] got " + name) && job.read_until("[1] got " + name));
    job.signal(SIGHUP);
    ASSERT_TRUE(has_taken(job.pid(), SIGHUP));
    job.signal(SIGUSR1);
    ASSERT_TRUE(job.read_until("[0] got USR1") && job.read_until("[1] got USR1")) << job.err;  // they live
    if (first == SIGHUP) {
      job.signal(SIGTERM);  // nor is the one after SIGHUP
      ASSERT_TRUE(has_taken(job.pid(), SIGTERM));
    }
    job.signal(SIGUSR2);
    EXPECT_EQ(job.finish(), 0) << job.err;
  }
}

TEST_F(Launch, StubbornRanksAreKilledAfterTheStopGrace) {
  Process job(run_of({"-n", "2", "--stop-grace", "200ms"}, {"signals", "stubborn"}));
  ASSERT_TRUE(job.read_until("[0] ready") && job.read_until("[1] ready")) << job.err;
  job.signal(SIGTERM);
  EXPECT_EQ(job.finish(), 128 + SIGTERM);
  EXPECT_THAT(job.err, AllOf(HasSubstr("rank 0, rank 1 had not ended 200 ms later and was killed"),
                             HasSubstr("--stop-grace gives it more time")));
}

TEST_F(Launch, NohupIsRespected) {
  Process job(run_of({"-n", "1"}, {"signals"}), {.ignore = SIGHUP});
  ASSERT_TRUE(job.read_until("[0] ready"));
  job.signal(SIGHUP);
  job.signal(SIGUSR2);
  EXPECT_EQ(job.finish(), 0) << job.err;
  EXPECT_THAT(job.out, Not(HasSubstr("HUP")));
}

TEST_F(Launch, SuspendingSuspendsTheRanks) {
  Process job(run_of({"-n", "2"}, {"family"}));
  ASSERT_TRUE(job.read_until("[0] ready") && job.read_until("[1] ready"));
  const auto children = children_of(job.pid());
  const auto all_are = [&](char state) {
    for (const auto deadline = patience(); !deadline.passed(); ::poll(nullptr, 0, 1)) {
      const auto ranks =
          std::count_if(children.begin(), children.end(), [&](pid_t pid) { return state_of(pid) == state; });
      if (ranks == (state == 'T' ? 2 : 3) && state_of(job.pid()) == state) return true;
    }
    return false;
  };
  ASSERT_EQ(children.size(), 3u) << "two ranks and the guardian";
  job.signal(SIGTSTP);
  EXPECT_TRUE(all_are('T'));
  job.signal(SIGCONT);
  EXPECT_TRUE(all_are('S'));
  job.signal(SIGTERM);
  EXPECT_EQ(job.finish(), 128 + SIGTERM);
}

TEST_F(Launch, KillingTheLauncherLeavesNoProcess) {
  for (int repeat = 0; repeat < 5; ++repeat) {
    Process job(run_of({"-n", "3"}, {"family"}));
    for (const char* ready : {"[0] ready", "[1] ready", "[2] ready"}) ASSERT_TRUE(job.read_until(ready)) << job.err;
    job.signal(SIGKILL);
    EXPECT_EQ(job.wait(), 1000 + SIGKILL);
    ASSERT_THAT(processes_left(patience()), IsEmpty());
  }
}

TEST_F(Launch, KillingTheLauncherWhileItStartsLeavesNoProcess) {
  for (int delay = 0; delay < 40; ++delay) {
    Process job(run_of({"-n", "8"}, {"family"}));
    ::poll(nullptr, 0, delay / 2);  // any moment is right; this spreads them
    job.signal(SIGKILL);
    EXPECT_EQ(job.wait(), 1000 + SIGKILL);
    ASSERT_THAT(processes_left(patience()), IsEmpty()) << delay;
  }
}

TEST_F(Launch, KillingTheLauncherOfAJobWithinAJobLeavesNoProcess) {
  Process job({kMusterCommand, "run", "-n", "1", kMusterCommand, "run", "-n", "2", kLaunchProgram, "family"});
  ASSERT_TRUE(job.read_until("[0] [0] ready") && job.read_until("[0] [1] ready")) << job.err;
  job.signal(SIGKILL);
  EXPECT_EQ(job.wait(), 1000 + SIGKILL);
  EXPECT_THAT(processes_left(patience()), IsEmpty());
}

TEST_F(Launch, WhatRanksLeaveRunningEndsWithTheJob) {
  for (const auto& [how, status] : {std::pair("end", 0), std::pair("fail", 4)}) {
    Process job(run_of({"-n", "2"}, {"family", how}));
    EXPECT_EQ(job.finish(), status) << job.err;  // finish() needs the ends of pipes that those processes hold
    EXPECT_THAT(processes_left(Deadline::after(seconds(3))), IsEmpty()) << how;
  }
}

TEST_F(Launch, BadInputIsOneSentenceAndStatus2) {
  const auto folder = std::filesystem::temp_directory_path() / text("muster-launch-", ::getpid());
  std::filesystem::create_directory(folder);
  const auto write = [&](const char* name, const char* content, mode_t mode) {
    std::ofstream(folder / name) << content;
    ::chmod((folder / name).c_str(), mode);
  };
  write("here", "#!/bin/sh\n", 0755);
  write("plain", "#!/bin/sh\n", 0644);
  write("no-interpreter", "echo started\n", 0755);
  write("bad-interpreter", "#!/no/such/shell\necho started\n", 0755);
  const std::pair<Words, const char*> cases[] = {
      {{"-n", "0", "true"}, "-n: expected 1 to 4096 ranks, got 0"},
      {{"-n", "-3", "true"}, "ranks, got -3"},
      {{"-n", "two", "true"}, "-n: expected a whole number of ranks, got 'two'"},
      {{"-n", "2x", "true"}, "got '2x'"},
      {{"-n", "", "true"}, "got ''|number of ranks is missing"},
      {{"-n", "4097", "true"}, "expected 1 to 4096 ranks"},
      {{"-n", "99999999999999999999", "true"}, "expected 1 to 4096 ranks"},
      {{"-n"}, "-n needs a value"},
      {{"-n", "2", "-n", "3", "true"}, "--ranks is given twice"},
      {{"-n", "2", "--log-dir", "--redirect", "true"}, "--log-dir needs a value, and --redirect is an option"},
      {{"-n", "2", "--node-rank", "1", "true"}, "--node-rank 1 is for a job of several hosts"},
      {{"-n", "2", "--node-rank", "-2", "true"}, "--node-rank: expected 0 or more, or -1 for any number, got -2"},
      {{"-n", "2", "--rdzv", "", "true"}, "--rdzv: expected an address, got nothing"},
      {{"true"}, "number of ranks is missing"},
      {{"-n", "2"}, "there is no program to run"},
      {{"-n", "2", "--"}, "there is no program to run"},
      {{"-n", "2", "--bogus", "true"}, "there is no option --bogus"},
      {{"-n", "2", "-z", "true"}, "there is no option -z"},
      {{"-n", "2", "--grace", "soon", "true"}, "got 'soon'"},
      {{"-n", "2", "--grace", "-1", "true"}, "got '-1'"},
      {{"-n", "2", ""}, "program's name is empty"},
      {{"-n", "2", "./nowhere"}, "there is no program './nowhere'"},
      {{"-n", "2", "./here/it"}, "there is no program './here/it'"},
      {{"-n", "2", "nowhere-at-all"}, "there is no program 'nowhere-at-all' in PATH"},
      {{"-n", "2", "here"}, "Did you mean ./here\\?"},
      {{"-n", "2", "/usr"}, "'/usr' is a folder"},
      {{"-n", "2", "./plain"}, "'./plain' is not executable.*chmod"},
      {{"-n", "2", "./no-interpreter"}, "neither a program for this machine nor a script with an interpreter"},
      {{"-n", "64", "./bad-interpreter"}, "interpreter '/no/such/shell'.* is not there"},
  };
  for (const auto& [words, message] : cases) {
    Words command{kMusterCommand, "run"};
    command.insert(command.end(), words.begin(), words.end());
    Process job(command, {.folder = folder.string()});
    EXPECT_EQ(job.finish(), 2) << join(words, " ");
    EXPECT_EQ(job.out, "");
    EXPECT_THAT(job.err, AllOf(StartsWith("muster: "), ContainsRegex(message)));
    EXPECT_EQ(lines_of(job.err).size(), 1u) << job.err;
    EXPECT_TRUE(children_of(::getpid()).empty());
  }
  Process unknown({kMusterCommand, "frobnicate"});
  EXPECT_EQ(unknown.finish(), 2);
  EXPECT_THAT(unknown.err, HasSubstr("no command 'frobnicate'"));
  std::filesystem::remove_all(folder);
}

TEST_F(Launch, OptionsAfterTheProgramAreTheProgrammes) {
  for (const Words& words : {Words{"-n", "1", "echo", "-n", "2", "--grace", "--", "run"},
                             Words{"-n1", "--grace=1s", "--", "echo", "-n", "2", "--grace", "--", "run"}}) {
    Words command{kMusterCommand, "run"};
    command.insert(command.end(), words.begin(), words.end());
    Process job(command);
    EXPECT_EQ(job.finish(), 0) << job.err;
    EXPECT_EQ(job.out, "[0] 2 --grace -- run\n");
  }
}

TEST_F(Launch, Rank0HasTheInputAndTheOthersHaveNone) {
  Process job(run_of({"-n", "2"}, {"input"}), {.input = "hello\n", .has_input = true});
  EXPECT_EQ(job.finish(), 0);
  EXPECT_THAT(lines_of(job.out), UnorderedElementsAre("[0] read hello", "[1] no input"));
  Process terminal(run_of({"-n", "2"}, {"input"}), {.terminal = true, .env = {"TERM=dumb"}});
  EXPECT_EQ(terminal.finish(), 0) << "a rank that reads the terminal from the background would be stopped";
}

TEST_F(Launch, RanksGetNoOtherDescriptors) {
  const UniqueFd leak(::open("/dev/null", O_RDONLY));  // not close-on-exec: the launcher has it, its ranks must not
  ASSERT_GT(leak.get(), 2);
  Process job(run_of({"-n", "3"}, {"descriptors"}));
  ASSERT_EQ(job.finish(), 0);
  auto lines = lines_of(job.out);
  std::sort(lines.begin(), lines.end());
  std::vector<std::string> expected;  // the black box: the rank's own and no other's, or there would be more
  for (const int rank : {0, 1, 2})
    for (const char* what : {"black box", "fd 0", "fd 1", "fd 2"}) expected.push_back(text('[', rank, "] ", what));
  EXPECT_EQ(lines, expected);
}

TEST_F(Launch, RanksStartWithDefaultSignals) {
  Process job(run_of({"-n", "1"}, {"signal-state"}), {.ignore = SIGINT});
  ASSERT_EQ(job.finish(), 0);
  for (const char* name : {"SigBlk", "SigIgn", "SigCgt"})
    EXPECT_THAT(job.out, HasSubstr(text("[0] ", name, ":\t0000000000000000\n")));
}

TEST_F(Launch, NothingListensOnANetwork) {
  Process job(run_of({"-n", "2"}, {"sockets"}));
  ASSERT_EQ(job.finish(), 0);
  EXPECT_THAT(lines_of(job.out), UnorderedElementsAre("[0] sockets some, network 0", "[1] sockets some, network 0"));
}

// They run at the same time. Each has a store of its own, and a port for scripts that bring theirs.
TEST_F(LaunchFolder, TwentyJobsAtOnceNeedNoPorts) {
  constexpr int kJobs = 20;
  const auto go = path("go");
  std::vector<std::unique_ptr<Process>> jobs;
  for (int job = 1; job <= kJobs; ++job)
    jobs.push_back(std::make_unique<Process>(run_of({"-n", "2"}, {"sum", text(job), go})));
  for (const auto& job : jobs) ASSERT_TRUE(all_ready(*job, 2)) << job->err;
  std::ofstream(go).close();
  std::set<std::string> ports;
  for (int number = 1; number <= kJobs; ++number) {
    Process& job = *jobs[static_cast<size_t>(number - 1)];
    EXPECT_EQ(job.finish(), 0) << job.err;
    for (const int rank : {0, 1})
      EXPECT_THAT(job.out, HasSubstr(text('[', rank, "] rank ", rank, " of 2, sum ", 3 * number, ", port ")));
    for (const auto& line : lines_of(job.out))
      if (const auto at = line.find("port "); at != std::string::npos) ports.insert(line.substr(at));
  }
  EXPECT_EQ(ports.size(), static_cast<size_t>(kJobs));
}

// The system gives it to no other process, and yet rank 0 can listen there.
TEST_F(Launch, TheJobHoldsThePortThatItGivesToScripts) {
  Process job(run_of({"-n", "1"}, {"port"}));
  ASSERT_EQ(job.finish(), 0) << job.err;
  EXPECT_EQ(job.out, "[0] plain: EADDRINUSE\n[0] reuse: listens\n");
}

TEST_F(Launch, ManyRanksAndManyJobsAtOnce) {
  Process one(run_of({"-n", "64"}, {"environment"})), other(run_of({"-n", "64"}, {"environment"}));
  EXPECT_EQ(one.finish(), 0) << one.err;
  EXPECT_EQ(other.finish(), 0) << other.err;
  for (int rank = 0; rank < 64; ++rank)
    for (const auto* out : {&one.out, &other.out}) EXPECT_THAT(*out, HasSubstr(text('[', rank, "] RANK=", rank, '\n')));
}

// The launcher serves stores, and nobody knows how many processes will connect.
TEST_F(Launch, ItMayOpenAsManyFilesAsTheHardLimitAllows) {
  Process job(
      {"/bin/sh", "-c", text("ulimit -Sn 200; exec ", kMusterCommand, " run -n 1 ", kLaunchProgram, " signals")});
  ASSERT_TRUE(job.read_until("[0] ready")) << job.err;
  std::ifstream limits(text("/proc/", job.pid(), "/limits"));
  std::string line, soft, hard;
  while (std::getline(limits, line))
    if (line.starts_with("Max open files")) std::istringstream(line.substr(14)) >> soft >> hard;
  EXPECT_NE(soft, "");
  EXPECT_EQ(soft, hard);
  job.signal(SIGUSR2);
  EXPECT_EQ(job.finish(), 0) << job.err;
}

// The launcher needs more descriptors than its soft limit allows, so it raises the limit. The ranks keep the old one.
TEST_F(Launch, AJobOf512RanksHasEnoughDescriptors) {
  constexpr int kRanks = 512;
  Process job(
      {"/bin/sh", "-c", text("ulimit -Sn 256; exec ", kMusterCommand, " run -n ", kRanks, " sh -c 'ulimit -Sn'")});
  ASSERT_EQ(job.finish(), 0) << job.err;
  std::set<std::string> expected;
  for (int rank = 0; rank < kRanks; ++rank) expected.insert(text('[', rank, "] 256"));
  const auto lines = lines_of(job.out);
  EXPECT_EQ(std::set<std::string>(lines.begin(), lines.end()), expected);
  EXPECT_EQ(lines.size(), expected.size());
}

}  // namespace
}  // namespace muster::test::launched_jobs
