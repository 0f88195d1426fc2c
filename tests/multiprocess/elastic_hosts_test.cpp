// muster::elastic::run() over several launchers, which are hosts to each other: ranks and launchers that are killed,
// launchers that come later, and processes that stay through all of it. They meet in a store that the test serves.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <sstream>

#include "multiprocess/campaign.h"
#include "muster/store/store.h"
#include "support/etcd.h"

namespace muster::test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kStepsWord = "12";

// What the ranks of some launchers printed.
struct Seen {
  std::map<std::string, std::string> losses;  // by step; of a step that was tried again, the last
  std::multiset<std::string> finals;          // checksums of the last parameters, one for each rank
};

class ElasticHosts : public JobFolderTest {
 protected:
  struct Host {
    std::string name;  // ranks of different names share no memory
    Words options, program;
    std::vector<std::string> env = {};
    std::string restarts = "9";
    std::string space = {};  // network namespace
    std::string patience = "2s";
  };

  Process& start(const Host& host) {
    Words options{"--rdzv",          rendezvous_.empty() ? server_->address() : rendezvous_,
                  "--rdzv-patience", host.patience,
                  "--max-restarts",  host.restarts};
    options.insert(options.end(), host.options.begin(), host.options.end());
    Words program{kElasticProgram, kStepsWord};
    program.insert(program.end(), host.program.begin(), host.program.end());
    Process::Options process;
    process.env = host.env;
    process.env.push_back("MUSTER_HOST=" + host.name);
    process.env.push_back("ELASTIC_GO=" + path("go"));
    Words command = run_program(options, program);
    if (!host.space.empty()) command.insert(command.begin(), {"/usr/bin/env", "ip", "netns", "exec", host.space});
    return *launchers_.emplace_back(std::make_unique<Process>(command, process));
  }

  void go() const { std::ofstream(path("go")).close(); }

  // Forgets the launchers of a job that has ended, and its store.
  void next_job() {
    launchers_.clear();
    server_ = serve_store();
    std::filesystem::remove(path("go"));
  }

  // Two launchers of two ranks, which share no memory with the other launcher's.
  Seen two_by_two(const Words& deaths) {
    for (const char* node : {"0", "1"}) start({node, {"--nnodes", "2", "--node-rank", node, "-n", "2"}, deaths});
    Seen seen;
    for (const auto& launcher : launchers_) {
      EXPECT_EQ(launcher->finish(), 0) << launcher->err;
      add(*launcher, &seen);
      err_ += launcher->err;
    }
    next_job();
    return seen;
  }

  // Two by two, once for all tests that run in one process.
  const Seen& undisturbed() {
    static const Seen quiet = two_by_two({});
    return quiet;
  }

  static void add(const Process& launcher, Seen* seen) {
    for (const auto& line : lines_of(launcher.out)) {
      const auto words = line.substr(line.find(' ') + 1);
      if (words.starts_with("step ")) seen->losses[words.substr(0, words.find(" loss"))] = words;
      if (words.starts_with("final ")) seen->finals.insert(words.substr(0, words.find(" buffers")));
    }
  }

  std::unique_ptr<StoreServer> server_ = serve_store();
  std::string rendezvous_;  // instead of that
  std::vector<std::unique_ptr<Process>> launchers_;
  std::string err_;
};

// These compare with undisturbed(), and so are run in one process.
class ElasticTwoByTwo : public ElasticHosts {};

TEST_F(ElasticTwoByTwo, ARankKilledOnEitherHostIsReplacedAndTheOthersStay) {
  const Seen& quiet = undisturbed();
  ASSERT_EQ(quiet.losses.size(), 12u);
  ASSERT_EQ(quiet.finals.size(), 4u);
  ASSERT_EQ(quiet.finals.count(*quiet.finals.begin()), 4u) << "the ranks differ";
  const Seen disturbed = two_by_two({"2@0:setup", "0@2:forward", "2@6:before+", "3@6:before", "3@11:barrier+"});
  EXPECT_EQ(disturbed.finals, quiet.finals);
  for (const auto& [step, loss] : disturbed.losses) EXPECT_EQ(loss, quiet.losses.at(step));
  EXPECT_GE(disturbed.losses.size() + 1, quiet.losses.size())
      << "at most the step in which rank 0 was killed is missing";
  EXPECT_THAT(err_, AllOf(HasSubstr("the other ranks stay, and the hosts meet again (1 of 9)"),
                          HasSubstr("meet again (3 of 9)"), HasSubstr("SIGKILL")));
}

// As one host to the ranks: all in one shared memory, of which a part belongs to another launcher.
TEST_F(ElasticHosts, TheProcessesOfSurvivorsStay) {
  const Words deaths{"3@5:forward"};
  Process& first = start({"one", {"--nnodes", "2", "--node-rank", "0", "-n", "2"}, deaths});
  Process& second = start({"one", {"--nnodes", "2", "--node-rank", "1", "-n", "2"}, deaths});
  EXPECT_EQ(first.finish(), 0) << first.err;
  EXPECT_EQ(second.finish(), 0) << second.err;
  const auto starts = [](const std::string& out) {
    size_t count = 0;
    for (const auto& line : lines_of(out)) count += line.ends_with(" started");
    return count;
  };
  EXPECT_EQ(starts(first.out), 2u);
  EXPECT_EQ(starts(second.out), 3u) << "the one that was killed, once more";
  EXPECT_THAT(first.out, AllOf(HasSubstr(":0] rank 0 of 4 from step 5"), HasSubstr(":1] rank 1 of 4 from step 5")));
  EXPECT_THAT(second.out, HasSubstr(":2] rank 2 of 4 from step 5"));
}

// Of one rank and of two that do the same, losses are equal.
constexpr const char* kSame = "ELASTIC_SAME=1";

TEST_F(ElasticHosts, WithoutALauncherThatWasKilledTheOthersGoOn) {
  const Seen quiet = [&] {
    Process& alone = start({"a", {"--nnodes", "1:2", "-n", "1"}, {}, {kSame}});
    EXPECT_EQ(alone.finish(), 0) << alone.err;
    Seen seen;
    add(alone, &seen);
    next_job();
    return seen;
  }();
  // The one that is left has a new number where the first is killed.
  for (const size_t victim : {1u, 0u}) {
    SCOPED_TRACE(text("node ", victim, " is killed"));
    for (const char* node : {"0", "1"})
      start({node, {"--nnodes", "1:2", "--node-rank", node, "-n", "1"}, {text(1 - victim, "@5:hold")}, {kSame}});
    Process &killed = *launchers_[victim], &left = *launchers_[1 - victim];
    ASSERT_TRUE(left.read_until("holds")) << left.err;
    killed.signal(SIGKILL);
    killed.wait();
    go();
    EXPECT_EQ(left.finish(), 0) << left.err;
    EXPECT_THAT(left.out, AllOf(HasSubstr("rank 0 of 1 from step 5"), HasSubstr("after 2 epochs")));
    EXPECT_THAT(left.err, HasSubstr("gave no sign of life"));
    Seen seen;
    add(left, &seen);
    EXPECT_EQ(*seen.finals.begin(), *quiet.finals.begin());
    next_job();
  }
}

// Its file is named after the number that it was started with.
TEST_F(ElasticHosts, TheErrorFileOfARankThatHasANewNumberIsStillItsOwn) {
  const std::string error = path("error.json");
  for (const char* node : {"0", "1"})
    start({node,
           {"--nnodes", "1:2", "--node-rank", node, "-n", "1", "--error-file", error + node},
           {"1@5:hold", "0@7:fail"},
           {kSame},
           "0"});
  Process &killed = *launchers_[0], &left = *launchers_[1];
  ASSERT_TRUE(left.read_until("holds")) << left.err;
  killed.signal(SIGKILL);
  killed.wait();
  go();
  EXPECT_EQ(left.finish(), 1) << left.err;
  EXPECT_THAT(left.out, HasSubstr("rank 0 of 1 from step 5"));
  EXPECT_THAT(left.err, HasSubstr("no more paper"));
  std::stringstream document;
  document << std::ifstream(error + "1").rdbuf();
  EXPECT_THAT(document.str(), AllOf(HasSubstr("no more paper"), HasSubstr("\"rank\": 0")));
  for (const auto& entry : std::filesystem::directory_iterator(folder()))
    EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr("error.json1."))) << "is left";
}

TEST_F(ElasticHosts, OfThreeLaunchersTwoGoOnAndKeepTheirRanks) {
  for (const char* node : {"0", "1", "2"})
    start({node, {"--nnodes", "2:3", "--node-rank", node, "-n", node[0] == '1' ? "2" : "1"}, {"0@5:hold"}});
  ASSERT_TRUE(launchers_[0]->read_until("holds")) << launchers_[0]->err;
  launchers_[2]->signal(SIGKILL);
  launchers_[2]->wait();
  go();
  Seen seen;
  for (const size_t node : {0u, 1u}) {
    EXPECT_EQ(launchers_[node]->finish(), 0) << launchers_[node]->err;
    EXPECT_THAT(launchers_[node]->out, AllOf(HasSubstr("of 4 from step 0"), HasSubstr("of 3 from step 5"),
                                             HasSubstr("after 2 epochs"), Not(HasSubstr("after 1 epochs"))));
    add(*launchers_[node], &seen);
  }
  EXPECT_EQ(seen.finals.size(), 3u);
  EXPECT_EQ(seen.finals.count(*seen.finals.begin()), 3u) << "the ranks differ";
  EXPECT_EQ(seen.losses.size(), 12u);
}

TEST_F(ElasticHosts, OneThatComesLaterBringsRanksAndTheOthersStay) {
  const Words options{"--nnodes", "1:2", "-n", "1"};
  Process& first = start({"a", options, {"0@5:hold"}, {kSame}});
  ASSERT_TRUE(first.read_until("holds")) << first.err;
  Process& second = start({"b", options, {}, {kSame}});
  ASSERT_TRUE(second.read_until("started")) << second.err;
  go();
  EXPECT_EQ(first.finish(), 0) << first.err;
  EXPECT_EQ(second.finish(), 0) << second.err;
  EXPECT_THAT(first.out, AllOf(HasSubstr("rank 0 of 1 from step 0"), HasSubstr("rank 0 of 2 from step "),
                               HasSubstr("after 2 epochs")));
  EXPECT_THAT(second.out, AllOf(HasSubstr("rank 1 of 2 from step "), Not(HasSubstr("from step 0"))));
  Seen seen;
  add(first, &seen);
  add(second, &seen);
  EXPECT_EQ(seen.finals.size(), 2u);
  EXPECT_EQ(seen.finals.count(*seen.finals.begin()), 2u) << "the newcomer differs";
}

TEST_F(ElasticTwoByTwo, ANewLauncherTakesThePlaceOfOneThatWasKilled) {
  const auto options = [](const char* node) { return Words{"--nnodes", "2", "--node-rank", node, "-n", "2"}; };
  const Seen& quiet = undisturbed();
  Process& first = start({"a", options("0"), {"1@5:hold"}});
  Process& second = start({"b", options("1"), {}});
  ASSERT_TRUE(first.read_until("rank 1 holds")) << first.err;
  second.signal(SIGKILL);
  second.wait();
  go();
  Process& third = start({"c", options("1"), {}});
  EXPECT_EQ(first.finish(), 0) << first.err;
  EXPECT_EQ(third.finish(), 0) << third.err;
  EXPECT_THAT(first.out, HasSubstr("after 2 epochs"));
  Seen seen;
  add(first, &seen);
  add(third, &seen);
  EXPECT_EQ(seen.losses, quiet.losses);
  EXPECT_EQ(seen.finals, quiet.finals);
}

TEST_F(ElasticHosts, WhoeverWaitsForAnotherHostCanBeStopped) {
  const Words options{"--nnodes", "2", "-n", "2"};
  Process& first = start({"a", options, {"0@5:hold", "2@5:hold"}});
  Process& second = start({"b", options, {"0@5:hold", "2@5:hold"}});
  ASSERT_TRUE(first.read_until("holds") && second.read_until("holds"));
  second.signal(SIGKILL);
  while (first.err.find("the hosts meet again") == std::string::npos) ASSERT_TRUE(first.read_some_more()) << first.err;
  first.signal(SIGTERM);
  EXPECT_EQ(first.finish(), 128 + SIGTERM) << first.err;
  EXPECT_THAT(first.err, HasSubstr("ended by SIGTERM"));
}

// Nobody is in a step then, and the state would be lost with those that wait.
TEST_F(ElasticHosts, AStopSavesWhatRanksHaveThatWaitForAnotherHost) {
  const std::vector<std::string> env{"ELASTIC_SNAPSHOT=" + path("snapshots")};
  const Words options{"--nnodes", "2", "-n", "2", "--stop-grace", "30s"};
  Process& first = start({"a", options, {"0@5:hold", "2@5:hold"}, env});
  Process& second = start({"b", options, {"0@5:hold", "2@5:hold"}, env});
  ASSERT_TRUE(first.read_until("holds") && second.read_until("holds"));
  second.signal(SIGKILL);
  while (first.err.find("the hosts meet again") == std::string::npos) ASSERT_TRUE(first.read_some_more()) << first.err;
  go();  // the one that holds notices its loss
  first.signal(SIGTERM);
  EXPECT_EQ(first.finish(), 0) << first.err;
  EXPECT_THAT(first.out, HasSubstr("asked to stop after 5 steps"));
  EXPECT_THAT(first.err, HasSubstr("saved step 5"));
  next_job();
  Process& again = start({"c", {"--nnodes", "1", "-n", "4"}, {}, env});
  EXPECT_EQ(again.finish(), 0) << again.err;
  EXPECT_THAT(again.out, HasSubstr("rank 0 of 4 from step 5"));
}

// Nor does their end need it: what they would tell each other by it is not waited for.
TEST_F(ElasticHosts, ATrainingComesToItsEndWithoutItsEtcd) {
  if (!Etcd::is_installed()) GTEST_SKIP() << "etcd is not installed: apt-get install etcd-server";
  Etcd etcd(1);
  rendezvous_ = etcd.address("jobs");
  for (const char* node : {"0", "1"})
    start({node, {"--nnodes", "2", "--node-rank", node, "-n", "2"}, {"0@4:hold"}, {}, "9", {}, "1500ms"});
  ASSERT_TRUE(launchers_[0]->read_until("rank 0 holds")) << launchers_[0]->err;
  etcd.kill_member(0);
  for (const auto& launcher : launchers_)
    while (launcher->err.find("the store does not answer") == std::string::npos)
      ASSERT_TRUE(launcher->read_some_more()) << launcher->err;
  go();
  Seen seen;
  for (const auto& launcher : launchers_) {
    EXPECT_EQ(launcher->finish(), 0) << launcher->err;
    EXPECT_THAT(launcher->err, HasSubstr("all ranks of this host ended well; of the others nothing is known"));
    add(*launcher, &seen);
  }
  EXPECT_EQ(seen.finals.size(), 4u);
  EXPECT_EQ(seen.finals.count(*seen.finals.begin()), 4u) << "the ranks differ";
}

// Ranks go on, and what is lost cannot be replaced; the state is saved.
TEST_F(ElasticHosts, ALossWithoutAnEtcdIsTheEndAndWhatTheOthersHaveIsSaved) {
  if (!Etcd::is_installed()) GTEST_SKIP() << "etcd is not installed: apt-get install etcd-server";
  Etcd etcd(1);
  rendezvous_ = etcd.address("jobs");
  const std::vector<std::string> env{"ELASTIC_SNAPSHOT=" + path("snapshots")};
  for (const char* node : {"0", "1"})
    start(
        {node, {"--nnodes", "2", "--node-rank", node, "-n", "1"}, {"0@4:hold", "1@7:before"}, env, "9", {}, "1500ms"});
  Process &stays = *launchers_[0], &loses = *launchers_[1];
  ASSERT_TRUE(stays.read_until("rank 0 holds")) << stays.err;
  etcd.kill_member(0);
  for (Process* launcher : {&stays, &loses})
    while (launcher->err.find("the store does not answer") == std::string::npos)
      ASSERT_TRUE(launcher->read_some_more()) << launcher->err;
  go();
  ASSERT_TRUE(stays.read_until("step 6 loss")) << "they train on without it: " << stays.err;
  EXPECT_EQ(loses.finish(), 128 + SIGKILL) << loses.err;
  // "... cannot go on together", or, where one was missed before, "... do not meet".
  EXPECT_THAT(loses.err,
              AllOf(HasSubstr("SIGKILL"),
                    ContainsRegex("it does not start again, since the hosts (cannot go on together|do not meet): ")));
  stays.signal(SIGTERM);
  EXPECT_EQ(stays.finish(), 0) << stays.err;
  EXPECT_THAT(stays.err, HasSubstr("saved step 7"));
}

TEST_F(ElasticHosts, WithoutRestartsALossIsTheEndOfAll) {
  const Words deaths{"2@5:between"};
  Process& first = start({"a", {"--nnodes", "2", "-n", "2"}, deaths, {}, "0"});
  Process& second = start({"b", {"--nnodes", "2", "-n", "2"}, deaths, {}, "0"});
  for (Process* launcher : {&first, &second}) {
    EXPECT_EQ(launcher->finish(), 128 + SIGKILL) << launcher->err;
    EXPECT_THAT(launcher->err, AllOf(HasSubstr("rank 2 (pid "), Not(HasSubstr("stay"))));
  }
}

// --- the campaign: random deaths, a store that stops, a network that is cut, a disk that is full ---

//   MUSTER_CAMPAIGN_ELASTIC   how many jobs whose ranks die (1); with 2 or more, each of three
//                             hosts is killed once, and cut off once
//   MUSTER_CAMPAIGN_SEED      printed by each run, to have it again
class ElasticCampaignProcess : public ElasticHosts {};

TEST_F(ElasticCampaignProcess, AnElasticJobOfTwoHostsEndsAsIfNobodyHadDied) {
  const int jobs = number("MUSTER_CAMPAIGN_ELASTIC", 1);
  const int seed = campaign_seed();
  std::cout << "seed " << seed << ", " << jobs << " jobs\n";
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  constexpr const char* kPhases[] = {"before", "forward", "between", "after"};
  const Seen& quiet = undisturbed();
  for (int job = 0; job < jobs && !HasFailure(); ++job) {
    Words deaths;
    for (int death = below(3); death >= 0; --death)
      deaths.push_back(text(below(4), '@', below(12), ':', kPhases[below(4)]));
    SCOPED_TRACE(text("seed ", seed, ", job ", job, ": ", join(deaths, ", ")));
    const Seen disturbed = two_by_two(deaths);
    EXPECT_EQ(disturbed.finals, quiet.finals) << err_;
    for (const auto& [step, loss] : disturbed.losses) EXPECT_EQ(loss, quiet.losses.at(step));
    EXPECT_THAT(processes_left(patience()), ::testing::IsEmpty());
    err_.clear();
  }
}

TEST_F(ElasticCampaignProcess, AnEtcdThatIsKilledAndComesAgainIsWaitedFor) {
  if (!Etcd::is_installed()) GTEST_SKIP() << "etcd is not installed: apt-get install etcd-server";
  const Seen& quiet = undisturbed();
  Etcd etcd(1);
  rendezvous_ = etcd.address("jobs");
  const Words phases{"0@5:hold", "3@7:before"};
  for (const char* node : {"0", "1"}) start({node, {"--nnodes", "2", "--node-rank", node, "-n", "2"}, phases});
  ASSERT_TRUE(launchers_[0]->read_until("rank 0 holds")) << launchers_[0]->err;
  etcd.kill_member(0);
  go();
  // However long it takes: longer than a launcher's calls.
  for (const auto& launcher : launchers_)
    while (launcher->err.find("the store does not answer") == std::string::npos)
      ASSERT_TRUE(launcher->read_some_more()) << launcher->err;
  etcd.start_member(0);
  Seen seen;
  for (const auto& launcher : launchers_) {
    EXPECT_EQ(launcher->finish(), 0) << launcher->err;
    add(*launcher, &seen);
  }
  EXPECT_EQ(seen.finals, quiet.finals);
}

// A host each, as far as the network goes.
class Namespaces {
 public:
  explicit Namespaces(int count) {
    std::string script = text("ip link add ", bridge_, " type bridge; ip addr add 10.213.8.1/24 dev ", bridge_,
                              "; ip link set ", bridge_, " up");
    for (int i = 0; i < count; ++i) {
      const std::string space = name(i), end = text("mu", ::getpid() % 100'000, 'v', i);
      script += text("; ip netns add ", space, "; ip link add ", end, " type veth peer name mu0 netns ", space,
                     "; ip link set ", end, " master ", bridge_, " up; ip -n ", space, " addr add 10.213.8.", 10 + i,
                     "/24 dev mu0; ip -n ", space, " link set mu0 up; ip -n ", space, " link set lo up");
      undo_ += text("; ip netns delete ", space);
    }
    made_ = Process({"/bin/sh", "-ec", script}).finish() == 0;
  }
  ~Namespaces() { Process({"/bin/sh", "-c", undo_}).finish(); }
  Namespaces(const Namespaces&) = delete;
  Namespaces& operator=(const Namespaces&) = delete;

  bool made() const { return made_; }
  std::string name(int i) const { return text("muster-", ::getpid(), "-h", i); }
  void cut(int i) const { Process({"/usr/bin/env", "ip", "-n", name(i), "link", "set", "mu0", "down"}).finish(); }

 private:
  const std::string bridge_ = text("mub", ::getpid() % 100'000);
  std::string undo_ = text("ip link delete ", bridge_);
  bool made_ = false;
};

TEST_F(ElasticCampaignProcess, OfThreeHostsAnyMayBeKilledOrCutOff) {
  if (!Etcd::is_installed()) GTEST_SKIP() << "etcd is not installed: apt-get install etcd-server";
  const Namespaces hosts(3);
  if (!hosts.made()) GTEST_SKIP() << "needs ip(8) (apt-get install iproute2) and the right to make namespaces";
  const Etcd etcd(1, "10.213.8.1");
  const bool all = number("MUSTER_CAMPAIGN_ELASTIC", 1) > 1;
  for (const auto& [victim, cut] : {std::pair{0, false}, {1, true}, {1, false}, {2, false}, {0, true}, {2, true}}) {
    if (!all && !(victim == 1 && cut)) continue;  // kills are what Restarts.AnyLauncherMayBeKilled… has
    SCOPED_TRACE(text("host ", victim, cut ? " is cut off" : " is killed"));
    rendezvous_ = etcd.address(text("jobs-", victim, cut));
    const int holds = victim == 0 ? 1 : 0;
    for (int i = 0; i < 3; ++i)
      start({text(i),
             {"--nnodes", "2:3", "--node-rank", text(i), "-n", "1"},
             {text(holds, "@5:hold")},
             {},
             "9",
             hosts.name(i)});
    ASSERT_TRUE(launchers_[static_cast<size_t>(holds)]->read_until("holds"))
        << launchers_[static_cast<size_t>(holds)]->err;
    const auto killed = Clock::now();
    if (cut)
      hosts.cut(victim);
    else
      launchers_[static_cast<size_t>(victim)]->signal(SIGKILL);
    go();
    for (int i = 0; i < 3; ++i) {
      if (i == victim) continue;
      Process& launcher = *launchers_[static_cast<size_t>(i)];
      EXPECT_TRUE(launcher.read_until(" of 2 from step ")) << launcher.out << launcher.err;
    }
    std::cout << "survivors trained again after " << std::chrono::duration<double>(Clock::now() - killed).count()
              << " s\n";
    Seen seen;
    for (int i = 0; i < 3; ++i) {
      Process& launcher = *launchers_[static_cast<size_t>(i)];
      launcher.signal(i == victim ? SIGKILL : 0);
      if (i == victim) continue;
      EXPECT_EQ(launcher.finish(), 0) << launcher.err;
      EXPECT_THAT(launcher.out, HasSubstr("after 2 epochs"));
      add(launcher, &seen);
    }
    EXPECT_EQ(seen.finals.count(*seen.finals.begin()), 2u) << "the ranks differ";
    next_job();
    if (cut) Process({"/usr/bin/env", "ip", "-n", hosts.name(victim), "link", "set", "mu0", "up"}).finish();
  }
}

// A file system of its own, with room for nothing.
TEST_F(ElasticCampaignProcess, AFullDiskLosesLogsAndSnapshotsAndNoJob) {
  const std::string disk = path("disk");
  const SmallDisk mounted(disk);
  if (!mounted) GTEST_SKIP() << "needs the right to mount a tmpfs";
  for (const char* folder : {"logs", "snapshots"}) std::filesystem::create_directory(disk + "/" + folder);
  const auto run = [&] {
    Process& job = start({"a",
                          {"--nnodes", "1", "-n", "2", "--log-dir", disk + "/logs"},
                          {"1@4:forward"},
                          {"ELASTIC_SNAPSHOT=" + disk + "/snapshots"}});
    EXPECT_EQ(job.finish(), 0) << job.err;
    return job.err;
  };
  std::ofstream(disk + "/filler") << std::string(1 << 20, 'x');
  EXPECT_THAT(run(), AllOf(HasSubstr("output are lost"), HasSubstr("No space left on device")));
  EXPECT_TRUE(std::filesystem::is_empty(disk + "/snapshots")) << "a torn one";
  std::filesystem::remove(disk + "/filler");
  next_job();
  EXPECT_THAT(run(), Not(HasSubstr("No space left")));
  EXPECT_TRUE(std::filesystem::exists(disk + "/snapshots/step-12.snapshot.safetensors"));
}

}  // namespace
}  // namespace muster::test
