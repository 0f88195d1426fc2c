// Jobs that start again: on one host, where their launchers meet in an etcd, and where one of the launchers serves the
// others' store.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

#include "launch/ranks/environment.h"
#include "multiprocess/restarts_fixture.h"
#include "muster/store/store.h"
#include "support/etcd.h"
#include "support/seccomp.h"

namespace muster::test::restarted_jobs {
namespace {

TEST_F(Restarts, AJobStartsAgainUntilItEndsWell) {
  Process job(run_of({"-n", "3", "--max-restarts", "5"}, {"fail-until", "2", "1"}));
  EXPECT_EQ(job.finish(), 0) << job.err;
  for (const int attempt : {0, 1, 2})
    for (const int rank : {0, 1, 2})
      EXPECT_THAT(job.out, HasSubstr(text("attempt ", attempt, " of rank ", rank, " of 3\n")));
  EXPECT_THAT(job.err, AllOf(HasSubstr("rank 1 (pid "), HasSubstr("exited with status 3"),
                             HasSubstr("| no luck in attempt 1"), HasSubstr("the job starts again (2 of 5)")));
}

TEST_F(Restarts, AfterTheLastOneTheJobFailsWithItsCause) {
  Process job(run_of({"-n", "2", "--max-restarts", "2"}, {"fail-until", "9", "0"}));
  EXPECT_EQ(job.finish(), 3);
  EXPECT_THAT(job.err, AllOf(HasSubstr("the job starts again (1 of 2)"), HasSubstr("the job starts again (2 of 2)"),
                             Not(HasSubstr("(3 of 2)"))));
  const auto last = job.err.substr(job.err.rfind("muster: "));
  EXPECT_THAT(last, AllOf(HasSubstr("rank 0"), HasSubstr("exited with status 3"), HasSubstr("no luck in attempt 2")));
}

TEST_F(Restarts, AUserWhoEndsTheJobEndsIt) {
  Process job(run_of({"-n", "2", "--max-restarts", "100"}, {"wait-for", "/does/not/exist"}));
  ASSERT_TRUE(job.read_until("rank 0 of 2 waits") && job.read_until("rank 1 of 2 waits"));
  job.signal(SIGTERM);
  EXPECT_EQ(job.finish(), 128 + SIGTERM) << job.err;
  EXPECT_THAT(job.err, AllOf(HasSubstr("ended by SIGTERM"), Not(HasSubstr("starts again"))));
}

TEST_F(Restarts, AProgramThatIsNotThereIsNotTriedAgain) {
  Process job({kMusterCommand, "run", "-n", "2", "--max-restarts", "5", "/etc/hostname"});
  EXPECT_EQ(job.finish(), 2);
  EXPECT_THAT(job.err, Not(HasSubstr("starts again")));
}

TEST_F(Restarts, AJobOfOneRankStartsAgainAsAWhole) {
  Process job(run_of({"-n", "1", "--max-restarts", "2"}, {"fail-until", "2", "0"}));
  EXPECT_EQ(job.finish(), 0) << job.err;
  EXPECT_THAT(job.err, AllOf(HasSubstr("the job starts again (2 of 2)"), Not(HasSubstr("others stay"))));
}

TEST_F(Restarts, WhoeverWaitsForAStoreThatNobodyServesCanBeStopped) {
  Process job(run_of({"--nnodes", "2", "--rdzv", "unix:@nobody-serves-this", "-n", "1"}, {"nothing"}));
  for (const auto patience = Deadline::after(kPatience); children_of(job.pid()).empty(); ::poll(nullptr, 0, 1))
    ASSERT_FALSE(patience.passed());  // its guardian, which comes after it has taken its signals
  EXPECT_EQ(job.wait(Deadline::after(milliseconds(300))), -1);
  job.signal(SIGINT);
  EXPECT_EQ(job.finish(Deadline::after(seconds(10))), 128 + SIGINT) << job.err;
}

// No launcher is needed by the others where the store is an etcd.
TEST_F(Restarts, AnyLauncherMayBeKilledWhereTheyMeetInAnEtcd) {
  if (!Etcd::is_installed()) GTEST_SKIP() << "etcd is not installed: apt-get install etcd-server";
  const Etcd etcd(1);
  const auto file = (std::filesystem::temp_directory_path() / text("muster-hosts-", ::getpid())).string();
  std::filesystem::remove(file);
  // A job for each victim, all concurrently: they spend their time on waiting for the dead.
  std::vector<std::vector<std::unique_ptr<Process>>> jobs(3);
  for (size_t victim = 0; victim < 3; ++victim)
    for (const char* node : {"0", "1", "2"})
      jobs[victim].push_back(
          std::make_unique<Process>(run_of({"--nnodes", "2:3", "--node-rank", node, "--rdzv", etcd.address("jobs"),
                                            "--rdzv-patience", "3s", "--job-id", text("victim-", victim), "-n", "1"},
                                           {"wait-for", file})));
  for (const auto& nodes : jobs)
    for (const auto& node : nodes) ASSERT_TRUE(node->read_until("of 3 waits on node")) << node->err;
  const auto killed = Clock::now();
  const Stolen stolen;
  for (size_t victim = 0; victim < 3; ++victim) jobs[victim][victim]->signal(SIGKILL);
  const auto survivors = [&](const auto& check) {
    for (size_t victim = 0; victim < 3; ++victim)
      for (size_t node = 0; node < 3; ++node) {
        SCOPED_TRACE(text("node ", node, ", of which ", victim, " was killed"));
        if (node != victim) check(*jobs[victim][node]);
      }
  };
  survivors([](Process& node) { EXPECT_TRUE(node.read_until("of 2 waits on node")) << node.err; });
  expect_recovered(killed, stolen);
  std::ofstream(file).close();
  survivors([](Process& node) { EXPECT_EQ(node.finish(), 0) << node.err; });
  std::filesystem::remove(file);
}

// Without --rdzv-patience. Nobody is missed while an etcd is away, and a host that is killed is.
TEST_F(Restarts, TheDefaultPatienceWithAnEtcdMissesOnlyAHost) {
  if (!Etcd::is_installed()) GTEST_SKIP() << "etcd is not installed: apt-get install etcd-server";
  Etcd etcd(1);
  const auto file = (std::filesystem::temp_directory_path() / text("muster-hosts-", ::getpid())).string();
  std::filesystem::remove(file);
  const Words program{"wait-for", file};
  const auto start = [&](const char* node) {
    return std::make_unique<Process>(run_of(
        {"--nnodes", "1:2", "--node-rank", node, "--rdzv", etcd.address("jobs"), "--job-id", "j", "-n", "1"}, program));
  };
  const auto stays = start("0"), leaves = start("1");
  for (const auto& node : {stays.get(), leaves.get()}) ASSERT_TRUE(node->read_until("of 2 waits on node")) << node->err;
  const auto met = stays->out.size();  // one may have begun alone
  etcd.kill_member(0);
  for (const auto& node : {stays.get(), leaves.get()})
    while (node->err.find("the store does not answer") == std::string::npos)
      ASSERT_TRUE(node->read_some_more()) << node->err;
  etcd.start_member(0);
  for (const auto& node : {stays.get(), leaves.get()})
    while (node->err.find("the store answers again") == std::string::npos)
      ASSERT_TRUE(node->read_some_more()) << node->err;
  EXPECT_THAT(stays->out.substr(met), Not(HasSubstr("of 1 waits")));
  leaves->signal(SIGKILL);
  while (stays->out.find("rank 0 of 1 waits on node 0 of 1", met) == std::string::npos)
    ASSERT_TRUE(stays->read_some_more()) << stays->err;
  std::ofstream(file).close();
  EXPECT_EQ(stays->finish(), 0) << stays->err;
  std::filesystem::remove(file);
}

// A job leaves one key, by which who comes too late learns that it has ended.
TEST_F(Restarts, NothingButItsEndIsLeftOfAJobInAnEtcd) {
  if (!Etcd::is_installed()) GTEST_SKIP() << "etcd is not installed: apt-get install etcd-server";
  const Etcd etcd(1);
  const auto run = [&](const char* status) {
    return std::make_unique<Process>(
        run_of({"--nnodes", "2", "--rdzv", etcd.address("jobs"), "--job-id", "j", "-n", "1", "--max-restarts", "2"},
               {"fail-until", status, "1"}));
  };
  const auto first = run("2"), second = run("2");
  EXPECT_EQ(first->finish(), 0) << first->err;
  EXPECT_EQ(second->finish(), 0) << second->err;
  EXPECT_EQ(connect_store(etcd.address("jobs"), Deadline::after(seconds(10)))->num_keys(), 1);
  const auto late = run("0");
  EXPECT_EQ(late->finish(), 0) << late->err;
  EXPECT_THAT(late->err, HasSubstr("the job has ended without this host"));
}

// Over the network, as on hosts of their own.
TEST_F(Restarts, LaunchersMeetOverTlsAtOneOfThem) {
  const auto folder = std::filesystem::temp_directory_path() / text("muster-secret-", ::getpid());
  std::filesystem::create_directory(folder);
  const std::string secret = (folder / "secret").string();
  Process make({kMusterCommand, "secret", secret});
  ASSERT_EQ(make.finish(), 0) << make.err;
  const auto port = launch::free_port();
  const auto run = [&](const char* node, const Words& more, const Words& behaviour) {
    Words options{"--nnodes", "2", "--node-rank", node, "--rdzv", text("localhost:", port), "-n", "2"};
    options.insert(options.end(), more.begin(), more.end());
    return std::make_unique<Process>(run_of(options, behaviour));
  };
  const auto second = run("1", {"--secret-file", secret, "--max-restarts", "2"}, {"fail-until", "1", "3"});
  const auto first = run("0", {"--secret-file", secret, "--max-restarts", "2"}, {"fail-until", "1", "3"});
  EXPECT_EQ(first->finish(), 0) << first->err;
  EXPECT_EQ(second->finish(), 0) << second->err;
  EXPECT_THAT(second->out, HasSubstr("attempt 1 of rank 3 of 4"));

  const auto without = run("0", {}, {"nothing"});
  EXPECT_EQ(without->finish(), 2);
  EXPECT_THAT(without->err, HasSubstr("muster secret FILE"));
  std::filesystem::remove_all(folder);
}

// The calling thread, and what it starts, have no IPv6 from now on; false where they still have.
bool has_no_ipv6() {
  sock_filter code[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
                        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args)),  // the family's low half
                        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_INET6, 0, 1),
                        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAFNOSUPPORT),
                        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  return test::filter_calls(code);
}

TEST_F(Restarts, AHostWithoutIPv6ServesTheOthersToo) {
  const Process::Options secret{.env = {"MUSTER_SECRET=0123456789abcdef0123456789abcdef"}};
  const auto address = text("127.0.0.1:", launch::free_port());
  bool without = false;
  std::thread([&] {  // the filter is this thread's, and the launcher ends with it
    if (!(without = has_no_ipv6())) return;
    Process job(run_of({"--nnodes", "1", "--node-rank", "0", "--rdzv", address, "-n", "1"}, {"nothing"}), secret);
    EXPECT_EQ(job.finish(), 0) << job.err;
  })
      .join();
  if (!without) GTEST_SKIP() << "no filter of system calls here";
}

TEST_F(Restarts, WhyALauncherCannotServeTheOthersIsSaid) {
  const UniqueFd taken(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof address;
  ASSERT_EQ(::bind(taken.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::getsockname(taken.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  Process job(run_of({"--nnodes", "2", "--rdzv", text("127.0.0.1:", ntohs(address.sin_port)), "--rdzv-timeout", "300ms",
                      "-n", "1"},
                     {"nothing"}),
              {.env = {"MUSTER_SECRET=0123456789abcdef0123456789abcdef"}});
  EXPECT_EQ(job.finish(), 1);
  EXPECT_THAT(job.err, AllOf(HasSubstr("nobody serves the store at"), HasSubstr("Address already in use")));
}

}  // namespace
}  // namespace muster::test::restarted_jobs
