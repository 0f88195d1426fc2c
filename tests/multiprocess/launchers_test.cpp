// Other launchers, for real: a program that calls muster::init() is started by torchrun and by mpirun.
#include <sys/socket.h>

#include <algorithm>
#include <sstream>

#include "base/fd.h"
#include "multiprocess/launch_support.h"
#include "support/network_sockets.h"

namespace muster::test {
namespace {

// The program's lines, sorted.
std::vector<std::string> lines_of_ranks(const std::string& out) {
  std::vector<std::string> lines;
  std::istringstream stream(out);
  for (std::string line; std::getline(stream, line);)
    if (const auto at = line.find("rank "); at != std::string::npos) lines.push_back(line.substr(at));
  std::sort(lines.begin(), lines.end());
  return lines;
}

const std::vector<std::string> kTwoRanks = {"rank 0 of 2, local 0 of 2, sum 3, backend shm",
                                            "rank 1 of 2, local 1 of 2, sum 3, backend shm"};

bool runs(std::vector<std::string> command) { return Process(std::move(command)).finish() == 0; }

TEST(LaunchersProcess, MusterRun) {
  Process job({kMusterCommand, "run", "-n", "2", kWorldProgram});
  ASSERT_EQ(job.finish(), 0) << job.err;
  EXPECT_EQ(lines_of_ranks(job.out), kTwoRanks);
}

TEST(LaunchersProcess, AFaultUnderMusterRunHasAStack) {
  Process job({kMusterCommand, "run", "-n", "2", kWorldProgram, "crash"});
  EXPECT_EQ(job.finish(), 128 + SIGSEGV);
  EXPECT_NE(job.err.find("[1] muster: SIGSEGV (11) at address 0x0, in thread "), std::string::npos) << job.err;
  EXPECT_NE(job.err.find("; its stack:\n  | (anonymous namespace)::follow(int const volatile*)"), std::string::npos)
      << job.err;
}

TEST(LaunchersProcess, AnAbortWithinLibtorchHasAStack) {
  Process job({kMusterCommand, "run", "-n", "2", kWorldProgram, "abort"});
  EXPECT_EQ(job.finish(), 128 + SIGABRT);
  const auto begin = job.err.find("\nmuster: rank 1 (pid ");
  ASSERT_NE(begin, std::string::npos) << job.err;
  const auto report = job.err.substr(begin);
  size_t at = 0;
  for (const char* words : {"killed by SIGABRT (6)", "\n  SIGABRT (6), in thread ", "; its stack:\n", "\n  | abort",
                            "free", "c10::TensorImpl::", " in libc10.so", "c10::ThreadPool::main_loop",
                            "its last lines on standard error:\n", "  | free(): invalid pointer\n"}) {
    at = report.find(words, at);
    ASSERT_NE(at, std::string::npos) << "no '" << words << "' in:" << report;
  }
}

// The launcher, the ranks, and what they started.
TEST(LaunchersProcess, NothingOfAJobOnOneHostIsOnANetwork) {
  const auto before = network_sockets_of(::getpid()).size();
  const UniqueFd own(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::listen(own.get(), 1), 0);
  EXPECT_EQ(network_sockets_of(::getpid()).size(), before + 1) << "this is how a socket is found that listens";
  Process job({kMusterCommand, "run", "-n", "2", kWorldProgram, "hold"});
  ASSERT_TRUE(job.read_until("[0] ready") && job.read_until("[1] ready")) << job.err;
  std::vector<pid_t> processes{job.pid()};
  for (size_t i = 0; i < processes.size(); ++i)
    for (const pid_t child : children_of(processes[i])) processes.push_back(child);
  EXPECT_EQ(processes.size(), 4u) << "the launcher, two ranks and the guardian";
  size_t others = 0;
  for (const pid_t pid : processes) {
    others += sockets_of(pid).size();
    for (const auto& socket : network_sockets_of(pid)) ADD_FAILURE() << "process " << pid << " has " << socket;
  }
  EXPECT_GE(others, 3u) << "the launcher and each rank have one for the store";
  job.signal(SIGUSR2);
  EXPECT_EQ(job.finish(), 0) << job.err;
  EXPECT_EQ(lines_of_ranks(job.out), kTwoRanks);
}

TEST(LaunchersProcess, Torchrun) {
  if (!runs({kPython, "-c", "import torch.distributed.run"}))
    GTEST_SKIP() << kPython << " has no torch: this libtorch comes without torchrun (pip install torch==2.13.0)";
  Process job(
      {kPython, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", kWorldProgram});
  ASSERT_EQ(job.finish(), 0) << job.err;
  EXPECT_EQ(lines_of_ranks(job.out), kTwoRanks);
}

TEST(LaunchersProcess, Mpirun) {
  if (!runs({"/bin/sh", "-c", "command -v mpirun"})) GTEST_SKIP() << "no mpirun here: apt-get install openmpi-bin";
  Process job({"/usr/bin/env", "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", kWorldProgram});
  ASSERT_EQ(job.finish(), 0) << job.err;
  EXPECT_EQ(lines_of_ranks(job.out), kTwoRanks);
}

TEST(LaunchersProcess, Alone) {
  Process job({"/usr/bin/env", "-u", "SLURM_PROCID", kWorldProgram});
  ASSERT_EQ(job.finish(), 0) << job.err;
  EXPECT_EQ(lines_of_ranks(job.out), std::vector<std::string>{"rank 0 of 1, local 0 of 1, sum 1, backend shm"});
}

}  // namespace
}  // namespace muster::test
