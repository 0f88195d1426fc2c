// What is said about a rank that dies of a fault, for lack of memory, or with an error file of its own.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "launch/kit/symbols.h"
#include "launch/ranks/oom_watch.h"
#include "multiprocess/job_test.h"
#include "support/memory_limit.h"

namespace muster::test {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

class FailureReport : public JobFolderTest {
 protected:
  void write(const std::string& name, const std::string& content) const {
    std::filesystem::create_directories((folder() / name).parent_path());
    std::ofstream(folder() / name) << content;
  }
  // The report without what the ranks themselves printed.
  static std::string report_of(const std::string& err) {
    const auto begin = err.find("\nmuster: rank");
    return begin == std::string::npos ? "" : err.substr(begin + 1);
  }
};

struct FatalFault {
  const char* how;
  int signal;
  const char* words;  // of the report
};

TEST_F(FailureReport, AFaultIsReportedWithTheStackOfItsThread) {
  const FatalFault faults[] = {
      {"segv", SIGSEGV,
       "SIGSEGV \\(11\\) at address 0x0, in thread [0-9]+ 'launch_program'; its stack:\n  \\| follow_bad_pointer\\(int "
       "volatile\\*\\)"},
      {"bus", SIGBUS,
       "SIGBUS \\(7\\) at address 0x[0-9a-f]+, in thread .*\n  \\| follow_bad_pointer\\(int volatile\\*\\)"},
      {"fpe", SIGFPE, "SIGFPE \\(8\\) at address 0x[0-9a-f]+, in thread .*\n  \\| divide\\(int\\)"},
      {"ill", SIGILL, "SIGILL \\(4\\) at address 0x[0-9a-f]+, in thread .*\n  \\| .*crash\\("},
      {"abort", SIGABRT, "SIGABRT \\(6\\), in thread (.*\n)+  \\| .*crash\\("},
      {"throw", SIGABRT,
       "exception std::runtime_error: the disk is full\n  SIGABRT \\(6\\), in thread (.*\n)+  \\| .*crash\\("},
      {"jump", SIGSEGV, "SIGSEGV \\(11\\) at address 0x10, in thread .*\n  \\| \\? \\+0x10\n  \\| .*(crash|main)"},
      {"thread", SIGSEGV,
       "SIGSEGV \\(11\\) at address 0x0, in thread (.*\n)+  \\| follow_bad_pointer\\(int volatile\\*\\)"},
      {"sent", SIGSEGV, "SIGSEGV \\(11\\), sent by process [0-9]+, in thread (.*\n)+  \\| .*crash\\("},
      {"overflow", SIGSEGV,
       "SIGSEGV \\(11\\) at address 0x[0-9a-f]+, the end of its stack, in thread .*\n  \\| recurse\\(int\\).*\n  \\| "
       "recurse\\(int\\).*\n  \\| recurse\\(int\\).*\n  \\| … [0-9]+ times more\n"},
      {"both", SIGSEGV,
       "SIGSEGV \\(11\\) at address 0x0, in thread (.*\n)+  \\| follow_bad_pointer\\(int volatile\\*\\)"},
  };
  for (const auto& [how, signal, words] : faults) {
    SCOPED_TRACE(how);
    Process job(run_of({"-n", "2"}, {"crash", "1", how}));
    EXPECT_EQ(job.finish(), 128 + signal) << "it dies of the signal that it had";
    auto report = report_of(job.err);
    const std::string nameless = "(anonymous namespace)::";
    for (size_t at; (at = report.find(nameless)) != std::string::npos;) report.erase(at, nameless.size());
    EXPECT_THAT(report, ContainsRegex(text("^muster: rank 1 \\(pid [0-9]+\\) killed by SIG[A-Z]+ \\(", signal, "\\)")));
    EXPECT_THAT(report, ContainsRegex(words));
    EXPECT_THAT(report, HasSubstr("\n  | a line before\n"));
    EXPECT_THAT(report, Not(HasSubstr("muster: stack:"))) << "the raw stack is not among the last lines";
    EXPECT_THAT(job.err, Not(HasSubstr("[1] muster: stack: "))) << "it is said once, with names";
  }
}

TEST_F(FailureReport, TheRankItselfSaysItWhoeverListens) {
  Process job(run_of({"-n", "1", "--no-prefix"}, {"crash", "0", "segv"}));
  EXPECT_EQ(job.finish(), 128 + SIGSEGV);
  EXPECT_THAT(job.err, ContainsRegex("\nmuster: stack: [^\n]*launch_program \\+0x[0-9a-f]+\n"));
}

TEST_F(FailureReport, ItCanBeTurnedOff) {
  Process job(run_of({"-n", "1"}, {"crash", "0", "segv"}), {.env = {"MUSTER_CRASH_REPORT=0"}});
  EXPECT_EQ(job.finish(), 128 + SIGSEGV);
  EXPECT_THAT(job.err, Not(HasSubstr("stack")));
}

TEST_F(FailureReport, WithoutReaderTheFaultStillEndsTheRank) {
  Process job({"/bin/sh", "-c", text(kMusterCommand, " run -n 1 ", kLaunchProgram, " crash 0 segv 2>&-")});
  EXPECT_EQ(job.finish(), 128 + SIGSEGV);
}

TEST_F(FailureReport, TheErrorFileSaysItAll) {
  const auto file = path("error.json");
  Process job(run_of({"-n", "2", "--error-file", file}, {"crash", "1", "throw"}));
  EXPECT_EQ(job.finish(), 128 + SIGABRT);
  std::ifstream in(file);
  const auto error = json::parse(in);
  EXPECT_EQ(error["status"], 128 + SIGABRT);
  EXPECT_EQ(error["rank"], 1);
  EXPECT_GT(error["pid"], 0);
  EXPECT_EQ(error["signal"], SIGABRT);
  EXPECT_EQ(error["exception"]["type"], "std::runtime_error");
  EXPECT_EQ(error["exception"]["text"], "the disk is full");
  EXPECT_THAT(error["stack"], Not(SizeIs(0)));
  EXPECT_THAT(error["last_lines"], Not(SizeIs(0)));
  EXPECT_THAT(static_cast<std::string>(error["cause"]), StartsWith("rank 1 (pid "));
  EXPECT_TRUE(error["rank_error"].is_null());
  EXPECT_THAT(job.err, HasSubstr(static_cast<std::string>(error["cause"])));

  Process good(run_of({"-n", "2", "--error-file", file}, {"nothing"}));
  EXPECT_EQ(good.finish(), 0);
  EXPECT_FALSE(std::filesystem::exists(file)) << "of the job before";
}

TEST_F(FailureReport, TheErrorFileOfARankIsTakenOver) {
  const auto file = path("error.json");
  Process job(run_of({"-n", "2", "--error-file", file}, {"error", "1"}));
  EXPECT_EQ(job.finish(), 1);
  EXPECT_THAT(job.err, ContainsRegex("exited with status 1\n  error RuntimeError: no more paper\n"));
  std::ifstream in(file);
  const auto error = json::parse(in);
  EXPECT_EQ(error["rank_error"]["message"]["message"], "RuntimeError: no more paper");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder()), {}), 1) << "the ranks' own files are gone";
}

TEST_F(FailureReport, AnErrorFileThatCannotBeWrittenIsNoSecondFailure) {
  for (const auto& [file, status, words] : {std::tuple(path("no/such/error.json"), 2, "cannot make the file"),
                                            std::tuple(std::string("/dev/full/x"), 2, "cannot make the file"),
                                            std::tuple(path(""), 2, "cannot make the file")}) {
    Process job(run_of({"-n", "1", "--error-file", file}, {"fail", "0", "3"}));
    EXPECT_EQ(job.finish(), status) << file;
    EXPECT_THAT(job.err, HasSubstr(words));
  }
}

TEST_F(FailureReport, WhatIsNoReportStays) {
  write("program", "#!/bin/sh\n");
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  ASSERT_EQ(::symlink(path("program").c_str(), path("link").c_str()), 0);
  for (const char* option : {"--error-file", "--black-box"})
    for (const char* name : {"program", "pipe", "link"}) {
      Process job(run_of({"-n", "1", option, path(name)}, {"nothing"}));
      EXPECT_EQ(job.finish(), 2) << option << ' ' << name;
      EXPECT_THAT(job.err, HasSubstr("cannot make the file"));
    }
  EXPECT_TRUE(std::filesystem::is_fifo(path("pipe")) && std::filesystem::is_symlink(path("link")));
  EXPECT_EQ(std::filesystem::file_size(path("program")), 10u);
  write("out.rank_1", "numbers of another program\n");
  Process ranks(run_of({"-n", "2", "--error-file", path("out")}, {"nothing"}));
  EXPECT_EQ(ranks.finish(), 2);
  EXPECT_THAT(ranks.err, HasSubstr("out.rank_1' for a rank's error: a file with other content has this name"));
  EXPECT_GT(std::filesystem::file_size(path("out.rank_1")), 0u);
  Process both(run_of({"-n", "1", "--error-file", path("x"), "--black-box", path("./x")}, {"nothing"}));
  EXPECT_EQ(both.finish(), 2);
  EXPECT_THAT(both.err, HasSubstr("would both be in"));
  // Either both reports are removed or none.
  write("old", "{}");
  Process neither(run_of({"-n", "1", "--error-file", path("old"), "--black-box", path("program")}, {"nothing"}));
  EXPECT_EQ(neither.finish(), 2);
  EXPECT_TRUE(std::filesystem::exists(path("old")));
  write("empty", "");  // as mktemp(1) leaves it
  Process well(run_of({"-n", "1", "--error-file", path("empty")}, {"fail", "0", "3"}));
  EXPECT_EQ(well.finish(), 3);
  EXPECT_GT(std::filesystem::file_size(path("empty")), 0u);
  write("by-hand", "\n { }");
  Process again(run_of({"-n", "1", "--error-file", path("by-hand"), "--black-box", "/dev/null"}, {"nothing"}));
  EXPECT_EQ(again.finish(), 0);
  EXPECT_FALSE(std::filesystem::exists(path("by-hand")));
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

TEST_F(FailureReport, HasNoControlCharacters) {
  Process job({kMusterCommand, "run", "-n", "1", "sh", "-c", R"(printf 'a\033[2Jb\007c\n' >&2; exit 3)"});
  EXPECT_EQ(job.finish(), 3);
  const std::string report = report_of(job.err);
  EXPECT_THAT(report, AllOf(HasSubstr("  | a [2Jb c\n"), Not(HasSubstr("\x1b"))));
}

TEST_F(FailureReport, AKillIsSaidToBeNoLackOfMemoryWhereTheKernelKnows) {
  const launch::OomWatch watch;  // for longer than the job's own
  Process job(run_of({"-n", "2"}, {"die", "1", text(SIGKILL)}));
  EXPECT_EQ(job.finish(), 128 + SIGKILL);
  const std::string nobody = "somebody killed it; the system did not run out of memory",
                    unknown = "the system ran out of memory (see dmesg), or somebody killed it";
  if (watch.about(job.pid()).known)
    EXPECT_THAT(job.err, HasSubstr(nobody));
  else
    EXPECT_THAT(job.err, AnyOf(HasSubstr(nobody), HasSubstr(unknown)));
}

TEST_F(FailureReport, ARankThatTheKernelKillsForItsMemoryRanOutOfMemory) {
  const MemoryLimit limit(size_t{64} << 20);
  if (!limit.unavailable_reason().empty()) GTEST_SKIP() << limit.unavailable_reason();
  Process job(limit.around(run_of({"-n", "2"}, {"eat", "1"})));
  EXPECT_EQ(job.finish(), 128 + SIGKILL);
  EXPECT_THAT(
      report_of("\n" + job.err),
      ContainsRegex("^muster: rank 1 \\(pid [0-9]+\\) killed by SIGKILL \\(9\\): the kernel's out-of-memory killer "
                    "ended it, since its cgroup has used up its 64 MiB; use less memory in each rank"));
  ASSERT_THAT(processes_left(patience()), IsEmpty());
}

TEST_F(FailureReport, LackOfMemoryIsKnownFromTheKernelsCounters) {
  write("proc/self/cgroup", "0::/pod/job\n");
  write("proc/vmstat", "nr_free_pages 1\noom_kill 3\n");
  write("sys/fs/cgroup/pod/memory.max", "1073741824\n");
  write("sys/fs/cgroup/pod/job/memory.max", "max\n");
  for (const char* group : {"pod", "pod/job"})
    write(text("sys/fs/cgroup/", group, "/memory.events"), "oom 5\noom_kill 5\noom_group_kill 0\n");
  const launch::OomWatch watch(folder());
  EXPECT_TRUE(watch.about(4711).known);
  EXPECT_FALSE(watch.about(4711).killed) << "kills before the job are not of the job";
  EXPECT_EQ(watch.about(4711).words, "somebody killed it; the system did not run out of memory");

  write("proc/vmstat", "oom_kill 4\n");
  EXPECT_FALSE(watch.about(4711).killed) << "a kill in another cgroup need not be of the job";
  EXPECT_FALSE(watch.about(4711).known) << "but may be";

  write("sys/fs/cgroup/pod/memory.events", "oom 6\noom_kill 6\n");
  EXPECT_THAT(watch.about(4711).words, HasSubstr("its cgroup has used up its 1 GiB"));
}

TEST_F(FailureReport, WithoutCgroupsItIsKnownFromTheCounterOfTheSystem) {
  write("proc/vmstat", "nr_free_pages 1\noom_kill 3\n");
  const launch::OomWatch watch(folder());
  EXPECT_EQ(watch.about(4711).words, "somebody killed it; the system did not run out of memory");
  write("proc/vmstat", "nr_free_pages 1\noom_kill 4\n");
  EXPECT_TRUE(watch.about(4711).killed);
  EXPECT_THAT(watch.about(4711).words, StartsWith("the system ran out of memory"));
}

TEST_F(FailureReport, SoItIsFromTheCountersOfTheFirstVersion) {
  write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/pod/job\n0::/\n");
  write("sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "1073741824\n");
  write("sys/fs/cgroup/memory/pod/job/memory.limit_in_bytes", "9223372036854771712\n");
  const auto job = "sys/fs/cgroup/memory/pod/job/memory.oom_control";
  write(job, "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n");
  const launch::OomWatch watch(folder());
  EXPECT_EQ(watch.about(4711).words, "somebody killed it; the system did not run out of memory");
  write(job, "oom_kill_disable 0\nunder_oom 0\noom_kill 6\n");
  EXPECT_THAT(watch.about(4711).words,
              AllOf(HasSubstr("its cgroup has used up its 1 GiB"), HasSubstr("or raise memory.limit_in_bytes")));
}

TEST_F(FailureReport, TheKernelsLogNamesTheProcess) {
  write("dev/kmsg", "3,1,1,-;Out of memory: Killed process 47110 (other) total-vm:1kB\n");
  EXPECT_FALSE(launch::OomWatch(folder()).about(4711).killed);
  write("dev/kmsg", "3,1,1,-;Out of memory: Killed process 4711 (train) total-vm:1kB\n");
  EXPECT_TRUE(launch::OomWatch(folder()).about(4711).killed);
  const auto nothing = launch::OomWatch("/nowhere").about(4711);
  EXPECT_FALSE(nothing.known);
  EXPECT_EQ(nothing.words, "");
}

TEST_F(FailureReport, NamesOfFramesSurviveEveryFile) {
  EXPECT_EQ(launch::parse_stack_frame("/a b/train +0x1f").file, "/a b/train");
  EXPECT_EQ(launch::parse_stack_frame("/a b/train +0x1f").offset, 0x1fu);
  for (const char* bad : {"", "train", "train +0x", "train +0xzz", "+0x1", "train +0x1f2f3f4f5f6f7f8f9"})
    EXPECT_EQ(launch::parse_stack_frame(bad).file, "") << bad;
  write("garbage", std::string("\177ELF") + std::string(1000, '\xff'));
  write("empty", "");
  const auto names =
      launch::name_frames({{path("garbage"), 1}, {path("empty"), 2}, {"/dev/zero", 3}, {"/nowhere/x", 4}, {"", 5}});
  EXPECT_EQ(names, (Words{"garbage +0x1", "empty +0x2", "zero +0x3", "x +0x4", " +0x5"}));
}

}  // namespace
}  // namespace muster::test
