// Other launchers, for real: a program that calls muster::init() is started by torchrun and by mpirun.
#include <algorithm>
#include <sstream>

#include "multiprocess/launch_support.h"

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
