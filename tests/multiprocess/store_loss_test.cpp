// Jobs of several launchers whose store goes for good: an etcd that is killed or stands still and never comes again, a
// launcher that serves the store and stands still. What needs no store goes on; what needs it ends in time, with a
// cause, the right status, an error file, and nothing left behind.
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include "launch/ranks/environment.h"
#include "multiprocess/job_test.h"
#include "muster/base/secret.h"
#include "muster/store/store.h"
#include "support/etcd.h"

namespace muster::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kSilent = "the store does not answer; ranks continue as long as they do not need it: no etcd at ";

// Two launchers of one rank each.
class StoreLoss : public JobFolderTest {
 protected:
  Process& start(const std::string& rendezvous, const Words& more, Words behaviour = {}, const std::string& env = {}) {
    const auto node = text(launchers_.size());
    Words options{"--rdzv", rendezvous, "--nnodes", "2", "--node-rank", node, "-n", "1", "--error-file", error(node)};
    options.insert(options.end(), more.begin(), more.end());
    if (behaviour.empty()) behaviour = {"wait-for", path("go")};
    Process::Options process;
    if (!env.empty()) process.env = {env};
    return *launchers_.emplace_back(std::make_unique<Process>(run_of(options, behaviour), process));
  }
  void await_ranks() {
    for (const auto& launcher : launchers_) ASSERT_TRUE(launcher->read_until("waits on node")) << launcher->err;
  }
  static void await_error(Process& launcher, const std::string& words) {
    while (launcher.err.find(words) == std::string::npos) ASSERT_TRUE(launcher.read_some_more()) << launcher.err;
  }
  void go() const { std::ofstream(path("go")).close(); }
  std::string error(const std::string& node) const { return path("error" + node + ".json"); }
  std::string error_of(size_t node) const {
    std::stringstream read;
    read << std::ifstream(error(text(node))).rdbuf();
    return read.str();
  }

  std::vector<std::unique_ptr<Process>> launchers_;
};

class EtcdLoss : public StoreLoss {
 protected:
  void SetUp() override {
    StoreLoss::SetUp();
    if (!Etcd::is_installed()) GTEST_SKIP() << "etcd is not installed: apt-get install etcd-server";
    etcd_ = std::make_unique<Etcd>(1);
  }
  Process& start(const Words& more, const Words& behaviour = {}) {
    return StoreLoss::start(etcd_->address("jobs"), more, behaviour);
  }
  void TearDown() override {
    etcd_.reset();
    StoreLoss::TearDown();
  }
  void lose_etcd() { etcd_->kill_member(0); }

  std::unique_ptr<Etcd> etcd_;
};

// 18 s for what needs the store, 3 s for a user who wants to stop.
const Words kBrief{"--rdzv-patience", "1500ms"};

TEST_F(EtcdLoss, RanksThatNeedNoStoreGoOnAndTheirLaunchersEndWell) {
  for (int node = 0; node < 2; ++node) start(kBrief);
  await_ranks();
  lose_etcd();
  for (const auto& launcher : launchers_) await_error(*launcher, kSilent);
  EXPECT_EQ(launchers_[0]->wait(Deadline::after(seconds(3))), -1) << launchers_[0]->err;
  go();
  const auto ended = Clock::now();
  for (const auto& launcher : launchers_) {
    EXPECT_EQ(launcher->finish(), 0) << launcher->err;
    EXPECT_THAT(launcher->err, AllOf(HasSubstr("all ranks of this host ended well; of the others nothing is known"),
                                     HasSubstr("no etcd at ")));
  }
  EXPECT_LT(Clock::now() - ended, seconds(25));
  for (const size_t node : {0u, 1u}) EXPECT_EQ(error_of(node), "") << "nothing failed";
}

TEST_F(EtcdLoss, AnEtcdThatComesAgainIsSeenAndNobodyMissed) {
  for (int node = 0; node < 2; ++node) start({"--rdzv-patience", "2s"});
  await_ranks();
  lose_etcd();
  for (const auto& launcher : launchers_) await_error(*launcher, kSilent);
  EXPECT_EQ(launchers_[0]->wait(Deadline::after(seconds(3))), -1) << launchers_[0]->err;  // more than any patience
  etcd_->start_member(0);
  for (const auto& launcher : launchers_) await_error(*launcher, "the store answers again");
  go();
  for (const auto& launcher : launchers_) {
    EXPECT_EQ(launcher->finish(), 0) << launcher->err;
    EXPECT_THAT(launcher->err, AllOf(Not(HasSubstr("nothing is known")), Not(HasSubstr("sign of life"))));
  }
}

TEST_F(EtcdLoss, ARankThatFailsIsTheCauseAndTheJobDoesNotStartAgain) {
  const Words behaviour{"wait-for", path("go"), "1"}, options{"--rdzv-patience", "1500ms", "--max-restarts", "9"};
  for (int node = 0; node < 2; ++node) start(options, behaviour);
  await_ranks();
  lose_etcd();
  for (const auto& launcher : launchers_) await_error(*launcher, kSilent);
  go();
  const auto failed = Clock::now();
  EXPECT_EQ(launchers_[1]->finish(), 3) << launchers_[1]->err;
  EXPECT_LT(Clock::now() - failed, seconds(25));
  EXPECT_THAT(launchers_[1]->err,
              AllOf(HasSubstr("exited with status 3"),
                    HasSubstr("it does not start again, since the hosts cannot go on"), HasSubstr("no etcd at ")));
  EXPECT_THAT(error_of(1), AllOf(HasSubstr("\"status\": 3"), HasSubstr("no etcd at ")));
  // The other rank communicates with nobody here, so nothing tells it. The user ends it.
  launchers_[0]->signal(SIGTERM);
  EXPECT_EQ(launchers_[0]->finish(), 128 + SIGTERM) << launchers_[0]->err;
  EXPECT_THAT(error_of(0), HasSubstr("ended by SIGTERM"));
}

TEST_F(EtcdLoss, AUserWhoStopsTheJobDoesNotWaitForIt) {
  for (int node = 0; node < 2; ++node) start(kBrief);
  await_ranks();
  lose_etcd();
  for (const auto& launcher : launchers_) await_error(*launcher, kSilent);
  const auto asked = Clock::now();
  for (const auto& launcher : launchers_) launcher->signal(SIGTERM);
  for (const auto& launcher : launchers_) {
    EXPECT_EQ(launcher->finish(), 128 + SIGTERM) << launcher->err;
    EXPECT_THAT(launcher->err, AllOf(HasSubstr("ended by SIGTERM"), Not(HasSubstr("cannot go on"))));
  }
  EXPECT_LT(Clock::now() - asked, seconds(10)) << "as for what needs the store";
}

TEST_F(EtcdLoss, WhoeverWaitsForOthersOrComesLaterEndsWithTheReason) {
  Process& waits = start({"--rdzv-patience", "1s", "--rdzv-timeout", "300s"});
  const auto seat = connect_store(etcd_->address("jobs"), Deadline::after(kPatience));
  seat->get("agents/0/seat/1", Deadline::after(kPatience));  // it has come
  lose_etcd();
  Process& late = start({"--rdzv-timeout", "1s"});
  EXPECT_EQ(late.finish(), 1);
  EXPECT_THAT(late.err, HasSubstr("the hosts do not meet: nobody serves the store at etcd://"));
  EXPECT_EQ(waits.finish(), 1);
  EXPECT_THAT(waits.err, HasSubstr("the hosts do not meet: no etcd at "));
  for (const size_t node : {0u, 1u})
    EXPECT_THAT(error_of(node), AllOf(HasSubstr("\"status\": 1"), HasSubstr("the hosts do not meet: ")));
}

// Its host lives, so no connection breaks: only the launchers' own calls tell. Their ranks end with them.
TEST_F(StoreLoss, TheStoresLauncherThatStandsStillForGoodIsNoticedInTime) {
  const auto port = launch::free_port();
  const std::string secret = "MUSTER_SECRET=" + Secret::generate().hex();
  for (int node = 0; node < 2; ++node) start(text("127.0.0.1:", port), {}, {}, secret);
  await_ranks();
  launchers_[0]->signal(SIGSTOP);
  const auto stopped = Clock::now();
  EXPECT_EQ(launchers_[1]->finish(), 1) << launchers_[1]->err;
  const auto took = Clock::now() - stopped;
  std::cout << "noticed after " << std::chrono::duration<double>(took).count() << " s\n";
  EXPECT_LT(took, seconds(20));
  EXPECT_THAT(launchers_[1]->err, HasSubstr("the hosts cannot go on together: the store at tls://"));
  EXPECT_THAT(error_of(1), HasSubstr("the hosts cannot go on together: the store at tls://"));
  launchers_[0]->signal(SIGKILL);
  EXPECT_EQ(launchers_[0]->finish(), 1000 + SIGKILL);
}

}  // namespace
}  // namespace muster::test
