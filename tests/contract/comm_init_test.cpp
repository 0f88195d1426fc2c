// init(): how ranks find each other from every launcher's environment, which forked processes fake.
#include <ATen/ops/ones.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <map>

#include "base/fd.h"
#include "base/text.h"
#include "muster/comm/collectives.h"
#include "support/forked.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using std::chrono::milliseconds;

using Environment = std::map<std::string, std::string>;

void set_environment(const Environment& environment) {
  for (const char* name : {"MUSTER_STORE", "MUSTER_FAULTS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                           "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID",
                           "JOB_COMPLETION_INDEX", "MUSTER_STORE_PREFIX", "TORCHELASTIC_USE_AGENT_STORE"})
    ::unsetenv(name);
  for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
}

// n processes, each with the environment that `of` returns for it, join and reduce. They do so twice, because a process
// may leave a job and join again.
void expect_world(int n, const std::function<Environment(int)>& of, int local = 0) {
  ForkedRanks ranks(n, [&](int rank) {
    set_environment(of(rank));
    WorldOptions options;
    options.timeout = kPatience;
    for (int attempt = 0; attempt < 2; ++attempt) {
      World world = init(options);
      EXPECT_EQ(world.rank(), rank);
      EXPECT_EQ(world.world_size(), n);
      EXPECT_EQ(world.local_world_size(), local ? local : n);
      const at::Tensor t = at::ones({3000}) * (rank + 1);
      all_reduce(t);
      EXPECT_EQ(t[2999].item<int>(), n * (n + 1) / 2);
      barrier();  // the process that serves the store stays until all have finished
    }
    return std::string();
  });
  for (const auto& end : ranks.wait_all(patience()))
    EXPECT_TRUE(end.exited && end.status == 0) << end.said << ", signal " << end.signal;
}

// A port that only this test uses. It is bound here but does not listen, so the system gives it only to a process that
// asks for its number.
class ReservedPort {
 public:
  ReservedPort() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int yes = 1;
    EXPECT_EQ(::setsockopt(fd_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes), 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
    EXPECT_EQ(::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
    number_ = text(ntohs(address.sin_port));
  }
  const std::string& number() const { return number_; }

 private:
  UniqueFd fd_;
  std::string number_;
};

TEST(InitFork, MusterRun) {
  const ForkedJob job;
  expect_world(3, [&](int rank) {
    return Environment{{"MUSTER_STORE", job.address()},
                       {"RANK", text(rank)},
                       {"WORLD_SIZE", "3"},
                       {"LOCAL_RANK", text(rank)},
                       {"LOCAL_WORLD_SIZE", "3"}};
  });
}

TEST(InitFork, EnvOverTcpStore) {
  const ReservedPort port;
  expect_world(2, [&](int rank) {
    return Environment{
        {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port.number()}, {"RANK", text(rank)}, {"WORLD_SIZE", "2"}};
  });
}

TEST(InitFork, PodsOfAnIndexedJob) {
  const ReservedPort port;
  expect_world(
      2,
      [&](int rank) {
        return Environment{{"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", port.number()},
                           {"JOB_COMPLETION_INDEX", text(rank)},
                           {"WORLD_SIZE", "2"}};
      },
      1);
}

TEST(InitFork, Mpirun) {
  expect_world(3, [&](int rank) {
    return Environment{{"OMPI_COMM_WORLD_RANK", text(rank)},
                       {"OMPI_COMM_WORLD_SIZE", "3"},
                       {"OMPI_COMM_WORLD_LOCAL_RANK", text(rank)},
                       {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                       {"PMIX_NAMESPACE", text("test-", ::getppid())}};
  });
  // Without PMIx the parent process names the job.
  expect_world(2, [&](int rank) {
    return Environment{{"OMPI_COMM_WORLD_RANK", text(rank)}, {"OMPI_COMM_WORLD_SIZE", "2"}};
  });
  expect_world(2, [&](int rank) { return Environment{{"PMI_RANK", text(rank)}, {"PMI_SIZE", "2"}}; });
}

TEST(InitFork, Srun) {
  expect_world(2, [&](int rank) {
    return Environment{{"SLURM_PROCID", text(rank)},  {"SLURM_STEP_NUM_TASKS", "2"},
                       {"SLURM_STEP_ID", "0"},        {"SLURM_JOB_ID", text("test", ::getppid())},
                       {"SLURM_LOCALID", text(rank)}, {"SLURM_STEP_NUM_NODES", "1"}};
  });
}

TEST(InitFork, Alone) {
  expect_world(1, [](int) { return Environment{}; });
  // A batch script of Slurm without srun.
  expect_world(1, [](int) { return Environment{{"SLURM_PROCID", "0"}, {"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "8"}}; });
}

TEST(InitFork, WrongValuesAreInvalidArgumentNamingTheVariable) {
  const Environment run = {{"MUSTER_STORE", "unix:@nobody"}, {"RANK", "0"}, {"WORLD_SIZE", "2"}};
  const Environment env = {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29555"}, {"RANK", "0"}, {"WORLD_SIZE", "2"}};
  const Environment mpi = {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}};
  const Environment slurm = {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_ID", "0"}};
  struct Wrong {
    Environment base;
    std::string name, value;  // value "": unset
    std::string said;
  };
  const std::vector<Wrong> table = {
      {run, "RANK", "zero", "RANK: expected a whole number, got 'zero'"},
      {run, "RANK", "", "RANK is not set"},
      {run, "RANK", "2", "RANK"},
      {run, "RANK", "-1", "RANK"},
      {run, "RANK", "4294967296", "RANK"},
      {run, "WORLD_SIZE", "", "WORLD_SIZE is not set"},
      {run, "WORLD_SIZE", "0", "WORLD_SIZE"},
      {run, "WORLD_SIZE", "2.5", "WORLD_SIZE: expected a whole number, got '2.5'"},
      {run, "WORLD_SIZE", "4294967298", "WORLD_SIZE"},
      {run, "LOCAL_RANK", "x", "LOCAL_RANK"},
      {run, "MUSTER_FAULTS", "explode:rank=1", "explode"},
      {env, "MASTER_PORT", "", "MASTER_PORT is not set"},
      {env, "MASTER_PORT", "http", "MASTER_PORT"},
      {env, "MASTER_PORT", "70000", "MASTER_PORT"},
      {env, "WORLD_SIZE", "", "WORLD_SIZE"},
      {mpi, "OMPI_COMM_WORLD_SIZE", "", "OMPI_COMM_WORLD_SIZE"},
      {mpi, "OMPI_COMM_WORLD_RANK", "5", "OMPI_COMM_WORLD_RANK"},
      {mpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "1", "MASTER_ADDR"},
      {slurm, "SLURM_PROCID", "9", "SLURM_PROCID"},
      {slurm, "SLURM_STEP_NUM_TASKS", "none", "SLURM_STEP_NUM_TASKS"},
  };
  for (const auto& wrong : table) {
    SCOPED_TRACE(wrong.name + "=" + wrong.value);
    ForkedRanks rank(1, [&](int) {
      Environment environment = wrong.base;
      environment[wrong.name] = wrong.value;
      set_environment(environment);
      if (wrong.value.empty()) ::unsetenv(wrong.name.c_str());
      WorldOptions options;
      options.timeout = milliseconds(500);
      return message_of<InvalidArgument>([&] { const World world = init(options); });
    });
    const auto end = rank.wait(0, patience());
    EXPECT_TRUE(end.exited && end.status == 0) << end.said;
    EXPECT_CONTAINS(end.said, wrong.said);
  }
}

TEST(InitFork, AStoreThatNobodyServesIsUnavailable) {
  const ReservedPort port;
  for (const Environment& environment :
       {Environment{{"MUSTER_STORE", "unix:@muster-nobody"}, {"RANK", "0"}, {"WORLD_SIZE", "2"}},
        Environment{{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port.number()}, {"RANK", "1"}, {"WORLD_SIZE", "2"}},
        Environment{{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}}}) {
    SCOPED_TRACE(environment.begin()->first);
    ForkedRanks rank(1, [&](int) {
      set_environment(environment);
      WorldOptions options;
      options.timeout = milliseconds(700);
      return message_of<Unavailable>([&] { const World world = init(options); });
    });
    const auto end = rank.wait(0, patience());
    EXPECT_TRUE(end.exited && end.status == 0) << end.said;
    EXPECT_CONTAINS(end.said, "nobody serves");
  }
}

}  // namespace
}  // namespace muster::test
