// Random faults in ranks and launcher, one job each: the right exit status, the right cause, and nothing left behind.
//
//   MUSTER_CAMPAIGN_FAULTS   how many (20)
//   MUSTER_CAMPAIGN_SEED     printed by each run, to have it again
#include <gmock/gmock.h>

#include <map>
#include <random>

#include "multiprocess/campaign.h"
#include "support/full_run.h"
#include "support/patience.h"

namespace muster::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Fault {
  const char* name;
  int status;         // as Process::finish() gives it
  const char* cause;  // a regular expression for the report's first line; {}: the rank
  int least_ranks = 1;
};

constexpr Fault kFaults[] = {
    {"kill", 128 + SIGKILL, "muster: rank {} \\(pid [0-9]+\\) killed by SIGKILL"},
    {"term", 128 + SIGTERM, "muster: rank {} \\(pid [0-9]+\\) killed by SIGTERM"},
    {"stop", 128 + SIGABRT, "exception muster::TimeoutError", 2},
    {"throw", 128 + SIGABRT, "exception std::runtime_error: the disk is full"},
    {"exit", 3, "muster: rank {} \\(pid [0-9]+\\) exited with status 3"},
    {"segv", 128 + SIGSEGV, "muster: rank {} \\(pid [0-9]+\\) killed by SIGSEGV"},
    {"overflow", 128 + SIGSEGV, "muster: rank {} \\(pid [0-9]+\\) killed by SIGSEGV"},
    {"abort", 128 + SIGABRT, "muster: rank {} \\(pid [0-9]+\\) killed by SIGABRT"},
    {"full", 128 + SIGXFSZ, "muster: rank {} \\(pid [0-9]+\\) killed by SIGXFSZ"},
    {"launcher-kill", 1000 + SIGKILL, nullptr},
    {"launcher-term", 128 + SIGTERM, "muster: the job was ended by SIGTERM"},
};

TEST(CampaignProcess, EveryFaultIsToldAndLeavesNothing) {
  const int count = number("MUSTER_CAMPAIGN_FAULTS", 20);
  const int seed = campaign_seed();
  std::cout << "seed " << seed << ", " << count << " faults\n";
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const OwnPlace place;
  std::map<std::string, int> done;
  for (int i = 0; i < count && !HasFailure(); ++i) {
    const Fault& fault = kFaults[below(std::size(kFaults))];
    const int ranks = fault.least_ranks + below(4), victim = below(ranks), delay = below(20'000);
    SCOPED_TRACE(text("seed ", seed, ", fault ", i, ": ", fault.name, " in rank ", victim, " of ", ranks, " after ",
                      delay, " us"));
    ++done[fault.name];
    Process job({kMusterCommand, "run", "-n", text(ranks), "--grace", "300ms", "--stop-grace", "300ms", kLaunchProgram,
                 "campaign", fault.name, text(victim), text(delay)});
    EXPECT_EQ(job.finish(), fault.status) << job.err;
    if (fault.cause) {
      std::string cause = fault.cause;
      if (const auto at = cause.find("{}"); at != std::string::npos) cause.replace(at, 2, text(victim));
      EXPECT_THAT(job.err, ContainsRegex(cause));
      const auto report = ("\n" + job.err).find("\nmuster: ");  // a rank that dies of a fault says "[0] muster: …"
      EXPECT_EQ(job.err.find("\n[", report), std::string::npos) << "lines of ranks after the report: " << job.err;
    }
    EXPECT_THAT(processes_left(full_run() ? Deadline::after(seconds(5)) : patience()), IsEmpty());
    place.expect_empty();
  }
  for (const auto& [name, times] : done) std::cout << "  " << name << ": " << times << '\n';
}

}  // namespace
}  // namespace muster::test
