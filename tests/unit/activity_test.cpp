// What muster ps, top and doctor report about boxes and machines that are made here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "launch/jobs/activity.h"
#include "launch/jobs/doctor.h"
#include "launch/kit/text_table.h"
#include "shm/black_box.h"

namespace muster::launch {
namespace {

using shm::BlackBoxOperation;
using shm::BlackBoxSnapshot;
using State = shm::BlackBoxState;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kSecondNs = 1'000'000'000, kLookedAt = 1000 * kSecondNs;

BlackBoxOperation collective(uint64_t sequence, uint64_t start, uint64_t end) {
  return {.ticket = sequence,
          .group = 0,
          .name = "all_reduce",
          .sequence = sequence,
          .posted_ns = start,
          .start_ns = start,
          .end_ns = end,
          .state = end == 0 ? State::kRunning : State::kDone};
}

BlackBoxSnapshot box_of(std::vector<BlackBoxOperation> operations) {
  BlackBoxSnapshot box{.world_size = 1, .groups = {{"world", 1, 1}}, .begun = operations.size()};
  box.operations = std::move(operations);
  return box;
}

TEST(CommunicationShare, IsTheUnionOfWhatRan) {
  EXPECT_EQ(communication_share(box_of({}), 0, 100), std::nullopt) << "a rank without operations";
  EXPECT_EQ(communication_share(box_of({collective(0, 10, 30)}), 0, 100), 0.2);
  EXPECT_EQ(communication_share(box_of({collective(0, 10, 30), collective(1, 20, 40)}), 0, 100), 0.3) << "they overlap";
  EXPECT_EQ(communication_share(box_of({collective(0, 10, 60), collective(1, 20, 40)}), 0, 100), 0.5)
      << "one in another";
  EXPECT_EQ(communication_share(box_of({collective(0, 50, 0)}), 0, 100), 0.5) << "still under way";
  EXPECT_EQ(communication_share(box_of({collective(0, 10, 60)}), 50, 100), 0.2) << "began before";
  EXPECT_EQ(communication_share(box_of({collective(0, 10, 20)}), 50, 100), 0.0) << "long ago";
  EXPECT_EQ(communication_share(box_of({collective(0, 10, 20)}), 100, 100), std::nullopt) << "no time at all";
}

TEST(CommunicationShare, CountsNoMessagesAndNothingThatWaitsForItsTurn) {
  auto message = collective(0, 10, 0);
  message.sequence = shm::kNoSequence;
  EXPECT_EQ(communication_share(box_of({message}), 0, 100), std::nullopt);
  auto posted = collective(1, 0, 0);
  posted.posted_ns = 10;
  posted.state = State::kPosted;
  EXPECT_EQ(communication_share(box_of({posted, collective(0, 90, 100)}), 0, 100), 0.1);
}

TEST(CommunicationShare, KnowsOnlyWhatTheBoxStillHolds) {
  auto box = box_of({collective(7, 80, 90)});
  box.begun = 8;  // seven are overwritten
  EXPECT_EQ(communication_share(box, 0, 100), 0.5);
}

JobBoxes job_at(uint64_t seconds, std::optional<uint64_t> samples, uint64_t reports, uint64_t reported_s) {
  JobBoxes job{.job = "a job", .taken_ns = seconds * kSecondNs};
  RankBox rank{.end = "running"};
  rank.box = box_of({collective(0, 1, 2)});
  rank.box.created_ns = 1;
  if (samples)
    rank.box.training = {.step = reports,
                         .samples = samples,
                         .started_ns = 100 * kSecondNs,
                         .reported_ns = reported_s * kSecondNs,
                         .reports = reports};
  job.ranks.push_back(std::move(rank));
  return job;
}

TEST(ActivityWatch, SamplesASecondOfReadingsThatLieApart) {
  ActivityWatch watch;
  EXPECT_EQ(watch.look(job_at(100, std::nullopt, 0, 0)).samples_per_second, std::nullopt) << "nothing reported";
  EXPECT_EQ(watch.look(job_at(101, 100, 1, 100)).samples_per_second, std::nullopt) << "one report gives no speed";
  EXPECT_EQ(watch.look(job_at(103, 300, 2, 102)).samples_per_second, 100.0);
  EXPECT_EQ(watch.look(job_at(104, 300, 2, 102)).samples_per_second, 100.0) << "between two reports it goes on";
  EXPECT_EQ(watch.look(job_at(120, 300, 2, 102)).samples_per_second, 10.0) << "a job that stands still slows down";
  EXPECT_EQ(watch.look(job_at(121, 50, 1, 121)).samples_per_second, std::nullopt) << "counts from the start";
}

TEST(ActivityWatch, OneReadingGivesTheMeanSinceTheStart) {
  // Four reports of 100 samples, the first at 100 s, the last at 103 s: 300 samples in 3 s.
  EXPECT_EQ(ActivityWatch().look(job_at(104, 400, 4, 103)).samples_per_second, 100.0);
}

TEST(ActivityTable, SaysWhatIsKnownAndLeavesOutTheRest) {
  ActivityWatch watch;
  const auto table = activity_table(watch.look(job_at(104, 4000, 4, 103)));
  EXPECT_THAT(table, HasSubstr("1,000 samples/s\n"));
  EXPECT_THAT(table, HasSubstr("4      1,000"));
  EXPECT_THAT(activity_table(ActivityWatch().look(job_at(104, std::nullopt, 0, 0))), Not(HasSubstr("samples/s\n")));
  const auto json = nlohmann::json::parse(activity_json(watch.look(job_at(104, std::nullopt, 0, 0))));
  EXPECT_TRUE(json["ranks"][0]["samples"].is_null());
}

TEST(JobSummary, AJobThatStandsStillSaysSo) {
  JobBoxes job{.job = "a job", .taken_ns = kLookedAt};
  RankBox rank{.end = "running"};
  rank.box = box_of({collective(12, kLookedAt - 31 * kSecondNs, 0)});
  rank.box.pid = ::getpid();
  job.ranks.push_back(rank);
  EXPECT_EQ(summarise(job).state, "stands still for 31 s in all_reduce #12");
  job.ranks[0].box.operations = {collective(12, kLookedAt - 2 * kSecondNs, 0)};
  EXPECT_EQ(summarise(job).state, "running");
  job.ranks[0].box.operations = {collective(12, kLookedAt - 40 * kSecondNs, kLookedAt - 31 * kSecondNs)};
  EXPECT_EQ(summarise(job).state, "running") << "it computes";
  job.ranks.push_back(rank);
  job.ranks[1].box.rank = 1;
  job.ranks[1].end = "stopped";
  EXPECT_EQ(summarise(job).state, "rank 1 stopped, stands still for 31 s in all_reduce #12");
}

TEST(TextTable, NumbersForPeople) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1234567), "1,234,567");
  EXPECT_EQ(with_commas(-123), "-123");
  EXPECT_EQ(clock_time(7), "0:07");
  EXPECT_EQ(clock_time(751), "12:31");
  EXPECT_EQ(clock_time(10812), "3:00:12");
  EXPECT_EQ(clock_time(86400 + 61), "1d 0:01:01");
  EXPECT_EQ(printable("a\x1b[1m\nb µ"), "a [1m b µ");
  EXPECT_EQ(printable("a\u009b1m\u0080\u00a0\u00c2"), "a 1m \u00a0\u00c2");
}

// --- muster doctor, on machines made of files ---

class Machine {
 public:
  Machine() { std::filesystem::create_directories(root_); }
  ~Machine() { std::filesystem::remove_all(root_); }
  Machine& file(const std::string& path, const std::string& content) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << content << '\n';
    return *this;
  }
  Finding find(const std::string& name, const BuiltWith& built_with = kBuiltWith) const {
    for (const auto& finding : examine(built_with, root_))
      if (finding.name == name) return finding;
    return {};
  }
  inline static const BuiltWith kBuiltWith{"1.2.3", "2.13.0", "/nowhere/lib", {"shm", "gloo"}};

 private:
  const std::filesystem::path root_ = std::filesystem::temp_directory_path() / text("muster-machine-", ::getpid());
};

TEST(Doctor, AMachineThatTellsNothingIsNoError) {
  const Machine machine;
  const auto findings = examine(Machine::kBuiltWith, "/nowhere");
  EXPECT_FALSE(findings.empty());
  EXPECT_EQ(machine.find("muster").value, "1.2.3");
  EXPECT_EQ(machine.find("memory").name, "") << "unknown is left out";
  EXPECT_EQ(machine.find("kernel").verdict, Verdict::kGood) << "tried out, not read";
}

TEST(Doctor, SeesTheLimitsOfAllCgroupsAround) {
  Machine machine;
  machine.file("proc/self/cgroup", "0::/pod/container")
      .file("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB");
  EXPECT_EQ(machine.find("memory").verdict, Verdict::kGood);
  machine.file("sys/fs/cgroup/pod/memory.max", "1073741824").file("sys/fs/cgroup/pod/container/memory.max", "max");
  EXPECT_EQ(machine.find("memory").verdict, Verdict::kNote);
  EXPECT_EQ(machine.find("memory").value, "16 GiB, 8 GiB available, limit of the cgroup 1 GiB");
  machine.file("sys/fs/cgroup/pod/cpu.max", "50000 100000");
  EXPECT_THAT(machine.find("cores").value, HasSubstr("0.5 by the cgroup's quota"));
  EXPECT_EQ(machine.find("cores").verdict, Verdict::kNote);
  machine.file("sys/fs/cgroup/pod/pids.max", "100");
  EXPECT_EQ(machine.find("processes").value, "100");
  EXPECT_NE(machine.find("processes").advice, "");
}

TEST(Doctor, SeesThoseOfTheFirstVersionToo) {
  Machine machine;
  machine.file("proc/self/cgroup", "5:memory:/pod/container\n3:cpu,cpuacct:/pod")
      .file("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB")
      .file("sys/fs/cgroup/memory/pod/container/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(machine.find("memory").verdict, Verdict::kGood) << "so large that there is none";
  machine.file("sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "2147483648");
  EXPECT_EQ(machine.find("memory").value, "16 GiB, 8 GiB available, limit of the cgroup 2 GiB");
  EXPECT_THAT(machine.find("memory").advice, HasSubstr("Raise memory.limit_in_bytes"));
  machine.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000").file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  EXPECT_THAT(machine.find("cores").value, HasSubstr("0.5 by the cgroup's quota"));
}

TEST(Doctor, JudgesWhatItFinds) {
  const std::tuple<const char*, const char*, const char*, Verdict> cases[] = {
      {"proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 1024 kB", "memory", Verdict::kBad},
      {"proc/sys/vm/overcommit_memory", "2", "overcommit", Verdict::kBad},
      {"sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]", "huge pages", Verdict::kNote},
      {"sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never", "huge pages", Verdict::kGood},
      {"proc/loadavg", "9999.0 1 1", "load", Verdict::kNote},
      {"proc/loadavg", "0.00 0 0", "load", Verdict::kGood},
      {"dev/nvidia0", "", "NVIDIA devices", Verdict::kNote},
  };
  for (const auto& [path, content, name, verdict] : cases) {
    Machine machine;
    EXPECT_EQ(machine.file(path, content).find(name).verdict, verdict) << path << ": " << content;
    EXPECT_EQ(machine.find(name).advice.empty(), verdict == Verdict::kGood);
  }
  const Machine machine;
  EXPECT_EQ(machine.find("libtorch").verdict, Verdict::kNote) << "its folder is gone";
  EXPECT_EQ(machine.find("backends", {"1", "2.13.0", "/", {"shm"}}).verdict, Verdict::kNote) << "no gloo";
}

TEST(Doctor, TheTableEndsWithASumAndAdviceFollowsItsFinding) {
  const std::vector<Finding> findings{{"cores", "2", Verdict::kGood, ""},
                                      {"memory", "1 GiB", Verdict::kBad, "Buy some"}};
  EXPECT_EQ(findings_table(findings),
            "cores        2\n"
            "memory  bad  1 GiB\n"
            "    => Buy some\n"
            "\n1 bad, 0 worth knowing, 1 good\n");
  const auto json = nlohmann::json::parse(findings_json(findings));
  EXPECT_EQ(json[1]["verdict"], "bad");
}

}  // namespace
}  // namespace muster::launch
