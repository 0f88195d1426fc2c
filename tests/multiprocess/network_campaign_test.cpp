// Random faults of the network between launchers and of the store where they meet: connections over TLS that are cut
// for a moment or for good, a launcher that serves the store and is killed, ended or stands still, for a moment or for
// good. Each: the right exit status on every host, the right cause, and nothing left behind.
//
//   MUSTER_CAMPAIGN_NETWORK   how many jobs (3: one of each of the first kinds); the long campaign also looks at what
//   is
//                             left on the whole machine, so nothing else should run beside it
//   MUSTER_CAMPAIGN_SEED      printed by each run, to have it again
#include <gmock/gmock.h>

#include <map>
#include <memory>

#include "launch/ranks/environment.h"
#include "multiprocess/campaign.h"
#include "muster/base/secret.h"
#include "muster/store/store.h"
#include "support/etcd.h"
#include "support/middleman.h"

namespace muster::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int kDefault = 3;
constexpr size_t kHosts = 3;
constexpr const char* kWentAway = "muster: the hosts cannot go on together: the store";

class NetworkCampaignProcess : public JobFolderTest {
 protected:
  // Launchers of one rank each. The first serves the store; the others come to it through a Middleman each.
  void start(const Words& more = {}) {
    std::filesystem::remove(path("go"));
    const auto port = static_cast<uint16_t>(launch::free_port());
    for (size_t host = 0; host < kHosts; ++host) {
      if (host > 0) ways_.push_back(std::make_unique<Middleman>(port));
      start_host(host, text("127.0.0.1:", host > 0 ? ways_.back()->port() : port), more);
    }
    await_counting();
  }

  void start_host(size_t host, const std::string& rendezvous, const Words& more) {
    Words options{"--nnodes", text(kHosts), "--node-rank", text(host), "-n",           "1",
                  "--rdzv",   rendezvous,   "--grace",     "300ms",    "--stop-grace", "300ms"};
    options.insert(options.end(), more.begin(), more.end());
    Process::Options process;
    process.env = {"MUSTER_SECRET=" + secret_.hex()};
    hosts_.push_back(std::make_unique<Process>(run_of(options, {"count-until", path("go")}), process));
  }

  void await_counting() {
    for (const auto& host : hosts_) ASSERT_TRUE(host->read_until(" counts")) << host->err;
  }

  void go() const { std::ofstream(path("go")).close(); }

  // As if nothing had been: no restart, and every count counted once.
  void expect_undisturbed() {
    go();
    for (const auto& host : hosts_) {
      EXPECT_EQ(host->finish(), 0) << host->err;
      EXPECT_THAT(host->err, Not(HasSubstr("muster: ")));
      EXPECT_THAT(host->out, HasSubstr(" sees "));
    }
  }
  void expect_end(size_t host, int status, const std::string& cause) {
    EXPECT_EQ(hosts_[host]->finish(), status) << "host " << host << ": " << hosts_[host]->err;
    const auto& err = hosts_[host]->err;
    const auto report = ("\n" + err).rfind("\nmuster: ");
    ASSERT_NE(report, std::string::npos) << "host " << host << ": " << err;
    EXPECT_THAT(err.substr(report), HasSubstr(cause)) << "host " << host << ": " << err;
  }

  void end_job() {
    EXPECT_THAT(processes_left(Deadline::after(seconds(5))), IsEmpty());
    hosts_.clear();
    ways_.clear();
  }

  const Secret secret_ = Secret::generate();
  std::vector<std::unique_ptr<Process>> hosts_;
  std::vector<std::unique_ptr<Middleman>> ways_;  // of hosts 1, 2 …
};

// Waits for what the ranks do, and not for a time: until the connections through it are new ones.
bool is_used_again(const Middleman& way) {
  for (const auto patience = Deadline::after(kPatience); !patience.passed(); ::poll(nullptr, 0, 1))
    if (way.connections() >= 2) return true;  // of a launcher and of its rank
  return false;
}

TEST_F(NetworkCampaignProcess, EveryCutAndEveryLossOfTheStoreIsHealedOrTold) {
  const int count = number("MUSTER_CAMPAIGN_NETWORK", kDefault), seed = campaign_seed();
  const OwnPlace place;
  std::cout << "seed " << seed << ", " << count << " jobs\n";
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  constexpr const char* kFaults[] = {"cuts",        "cut for good",   "store killed",         "stands still a moment",
                                     "store ended", "no byte passes", "stands still for good"};
  std::map<std::string, int> done;
  for (int i = 0; i < count && !HasFailure(); ++i) {
    const std::string fault = kFaults[i < kDefault ? i : below(std::size(kFaults))];
    const auto victim = static_cast<size_t>(1 + below(kHosts - 1));
    SCOPED_TRACE(text("seed ", seed, ", job ", i, ": ", fault, ", host ", victim));
    ++done[fault];
    start({"--rdzv-patience", fault == "cut for good" || fault == "no byte passes" ? "2s" : "5s"});
    if (HasFatalFailure()) return;
    Middleman& way = *ways_[victim - 1];
    ::poll(nullptr, 0, below(200));  // so that it meets them wherever they are
    if (fault == "cuts") {
      for (int cuts = 1 + below(5); cuts > 0; --cuts) {
        Middleman& other = *ways_[static_cast<size_t>(below(kHosts - 1))];
        switch (below(4)) {
          case 0:
            other.lose_next_answer();
            break;
          case 1:
            other.cut();
            break;
          default:
            other.set(below(2) ? Middleman::State::kDown : Middleman::State::kStill);
            ::poll(nullptr, 0, below(1000));
            other.set(Middleman::State::kOpen);
        }
        EXPECT_TRUE(is_used_again(other));
      }
      expect_undisturbed();
    } else if (fault == "stands still a moment") {
      hosts_[0]->signal(SIGSTOP);
      ::poll(nullptr, 0, below(1000));
      hosts_[0]->signal(SIGCONT);
      expect_undisturbed();
    } else if (fault == "store killed") {
      hosts_[0]->signal(SIGKILL);
      EXPECT_EQ(hosts_[0]->finish(), 1000 + SIGKILL);
      for (const size_t host : {1u, 2u}) expect_end(host, 1, kWentAway);
    } else if (fault == "stands still for good") {
      hosts_[0]->signal(SIGSTOP);
      for (const size_t host : {1u, 2u}) expect_end(host, 1, kWentAway);
      hosts_[0]->signal(SIGKILL);
      EXPECT_EQ(hosts_[0]->finish(), 1000 + SIGKILL);
    } else if (fault == "store ended") {
      hosts_[0]->signal(SIGTERM);
      for (size_t host = 0; host < kHosts; ++host) expect_end(host, 128 + SIGTERM, "the job was ended by SIGTERM");
    } else {
      way.set(fault == "cut for good" ? Middleman::State::kDown : Middleman::State::kStill);
      for (size_t host = 0; host < kHosts; ++host)
        if (host != victim) expect_end(host, 1, text("the agent of node ", victim, " ('"));
      if (fault == "no byte passes") way.set(Middleman::State::kDown);  // as a network that knows of its loss by now
      expect_end(victim, 1, kWentAway);
    }
    end_job();
    place.expect_empty();
  }
  for (const auto& [name, times] : done) std::cout << "  " << name << ": " << times << '\n';
}

}  // namespace
}  // namespace muster::test
