// muster ps, top and doctor on real jobs: running, stopped, without a World, gone.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "multiprocess/job_test.h"

namespace muster::test {
namespace {

using nlohmann::json;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

// What `muster words…` prints; it must succeed.
std::string look(const Words& words) {
  Words command{kMusterCommand};
  command.insert(command.end(), words.begin(), words.end());
  Process looker(command);
  EXPECT_EQ(looker.finish(), 0) << looker.err;
  EXPECT_EQ(looker.err, "");
  return looker.out;
}

// The job of this launcher, as muster ps tells it; null where it tells nothing.
json job_of(pid_t launcher) {
  for (auto& job : json::parse(look({"ps", "--json"})))
    if (job["launcher"] == launcher) return job;
  return nullptr;
}

class Operation : public JobTest {};

TEST_F(Operation, PsFindsAJobItsLauncherAndItsRanks) {
  Process job(run_of({"-n", text(3)}, {"black-box", "train"}));
  ASSERT_TRUE(all_ready(job, 3)) << job.err;
  const auto found = job_of(job.pid());
  ASSERT_FALSE(found.is_null());
  EXPECT_EQ(found["world_size"], 3);
  EXPECT_EQ(found["state"], "running");
  EXPECT_EQ(found["program"], text(kLaunchProgram, " black-box train"));
  EXPECT_GE(found["seconds"], 0);
  EXPECT_NEAR(static_cast<double>(found["since"]), static_cast<double>(::time(nullptr)), 60);
  const auto children = children_of(job.pid());
  ASSERT_EQ(found["ranks"].size(), 3u);
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(found["ranks"][rank]["rank"], rank);
    EXPECT_EQ(found["ranks"][rank]["has_world"], true);
    EXPECT_EQ(std::count(children.begin(), children.end(), static_cast<pid_t>(found["ranks"][rank]["pid"])), 1);
  }
  const auto id = static_cast<std::string>(found["job"]);
  EXPECT_THAT(look({"ps"}), ContainsRegex(text(id.substr(0, 12), " +", job.pid(), " +3 .* running +", kLaunchProgram)));
  job.signal(SIGTERM);
  EXPECT_EQ(job.finish(), 128 + SIGTERM);
  EXPECT_TRUE(job_of(job.pid()).is_null()) << "a job that has ended";
}

TEST_F(Operation, PsFindsRanksThatHaveNoWorld) {
  Process job(run_of({"-n", text(2)}, {"family"}));
  ASSERT_TRUE(all_ready(job, 2)) << job.err;
  const auto found = job_of(job.pid());
  ASSERT_FALSE(found.is_null());
  EXPECT_EQ(found["state"], "running");
  const auto children = children_of(job.pid());
  for (const auto& rank : found["ranks"]) {
    EXPECT_EQ(rank["has_world"], false);
    EXPECT_EQ(std::count(children.begin(), children.end(), static_cast<pid_t>(rank["pid"])), 1)
        << "and not one of the processes that the rank started";
  }
  job.signal(SIGTERM);
  job.finish();
}

TEST_F(Operation, PsNamesTheRankThatIsStopped) {
  Process job(run_of({"-n", text(2)}, {"black-box", "train"}));
  ASSERT_TRUE(all_ready(job, 2)) << job.err;
  const pid_t rank = job_of(job.pid())["ranks"][1]["pid"];
  ::kill(rank, SIGSTOP);
  for (const auto deadline = Deadline::after(kPatience); state_of(rank) != 'T' && !deadline.passed();)
    ::poll(nullptr, 0, 1);
  const auto found = job_of(job.pid());
  EXPECT_EQ(found["state"], "rank 1 stopped");
  EXPECT_EQ(found["ranks"][0]["state"], "running");
  EXPECT_EQ(found["ranks"][1]["state"], "stopped");
  job.signal(SIGKILL);
  job.finish();
}

TEST_F(Operation, PsListsJobsByAgeAndSaysWhereThereIsNone) {
  Process first(run_of({"-n", text(1)}, {"black-box", "train"}));
  ASSERT_TRUE(all_ready(first, 1)) << first.err;
  Process second(run_of({"-n", text(1)}, {"black-box", "train"}));
  ASSERT_TRUE(all_ready(second, 1)) << second.err;
  std::vector<pid_t> launchers;
  for (const auto& job : json::parse(look({"ps", "--json"}))) launchers.push_back(job["launcher"]);
  const auto place = [&](const Process& job) { return std::find(launchers.begin(), launchers.end(), job.pid()); };
  EXPECT_LT(place(first), place(second));
  EXPECT_NE(place(second), launchers.end());
  for (Process* job : {&first, &second}) {
    job->signal(SIGTERM);
    job->finish();
  }
  if (json::parse(look({"ps", "--json"})).empty()) {
    EXPECT_EQ(look({"ps"}), "no job of this user runs on this host\n");
  }
}

TEST_F(Operation, TopShowsStepsSpeedAndMemory) {
  Process job(run_of({"-n", text(2)}, {"black-box", "train"}));
  ASSERT_TRUE(all_ready(job, 2)) << job.err;
  const auto activity = json::parse(look({"top", "--once", "--json", "--pid", text(job.pid())}));
  EXPECT_EQ(activity["launcher"], job.pid());
  ASSERT_EQ(activity["ranks"].size(), 2u);
  for (const auto& rank : activity["ranks"]) {
    EXPECT_EQ(rank["step"], 3);
    EXPECT_EQ(rank["samples"], 192);
    EXPECT_GT(rank["samples_per_second"], 0);
    EXPECT_GE(rank["communication"], 0);
    EXPECT_LE(rank["communication"], 1);
    EXPECT_GT(rank["memory"], 100'000);
    EXPECT_GT(rank["memory"], rank["shared"]);
    EXPECT_THAT(static_cast<std::string>(rank["operation"]),
                StartsWith("all_reduce #4 of group 'world', 1.2 MiB, done"));
  }
  const auto table = look({"top", "--once", "--pid", text(job.pid())});
  EXPECT_THAT(table, ContainsRegex("\n +0 +[0-9]+ +running +3 +[0-9,]+ +[0-9]+ % .* all_reduce #4"));
  job.signal(SIGTERM);
  job.finish();
}

TEST_F(Operation, TopGoesOnUntilTheJobEnds) {
  Process job(run_of({"-n", text(2)}, {"black-box", "stall"}));
  ASSERT_TRUE(all_ready(job, 2)) << job.err;
  Process top({kMusterCommand, "top", "--pid", text(job.pid())});
  ASSERT_TRUE(top.read_until("all_reduce #5 of group 'world', 1.2 MiB, running")) << top.err;
  top.out.clear();
  ASSERT_TRUE(top.read_until("all_reduce #5")) << "a second look";
  job.signal(SIGTERM);
  job.finish();
  EXPECT_EQ(top.finish(), 0) << top.err;
  EXPECT_THAT(top.out, HasSubstr("the job has ended\n"));
}

TEST_F(Operation, TopEndsWhenItsReaderHasGone) {
  Process job(run_of({"-n", text(1)}, {"black-box", "alone"}));
  ASSERT_TRUE(all_ready(job, 1)) << job.err;
  Process top({kMusterCommand, "top", "--json", "--interval", "3600", "--pid", text(job.pid())});
  ASSERT_TRUE(top.read_until("\n")) << top.err;
  top.close_output();
  EXPECT_EQ(top.wait(), 1);
  job.signal(SIGTERM);
  job.finish();
}

TEST_F(Operation, OnATerminalTopDrawsOverItsLastTable) {
  Process job(run_of({"-n", text(2)}, {"black-box", "stall"}));
  ASSERT_TRUE(all_ready(job, 2)) << job.err;
  Process top({kMusterCommand, "top", "--pid", text(job.pid())}, {.terminal = true});
  ASSERT_TRUE(top.read_until("\x1b[4A\r")) << "the job, the heads, two ranks: " << top.out;
  job.signal(SIGTERM);
  job.finish();
  EXPECT_EQ(top.finish(), 0);
}

TEST_F(Operation, ARankThatNeverReportedHasNoStep) {
  Process job(run_of({"-n", text(1)}, {"black-box", "alone"}));
  ASSERT_TRUE(all_ready(job, 1)) << job.err;
  const auto activity = json::parse(look({"top", "--once", "--json", "--pid", text(job.pid())}));
  EXPECT_TRUE(activity["ranks"][0]["step"].is_null());
  EXPECT_TRUE(activity["samples_per_second"].is_null());
  EXPECT_GT(activity["ranks"][0]["communication"], 0) << "it waits in an all_reduce";
  job.signal(SIGTERM);
  job.finish();
}

TEST_F(Operation, BadInputIsOneSentence) {
  const std::pair<Words, const char*> cases[] = {
      {{"top", "--job", "no such job"}, "no job 'no such job' runs here"},
      {{"top", "--job", "a", "--pid", "1"}, "exclude each other"},
      {{"top", "--pid", "one"}, "got 'one'"},
      {{"top", "--interval", "0"}, "at least 1 second"},
      {{"ps", "--bogus"}, "there is no option --bogus"},
      {{"doctor", "now"}, "there is no option now"},
  };
  for (const auto& [words, message] : cases) {
    Words command{kMusterCommand};
    command.insert(command.end(), words.begin(), words.end());
    Process bad(command);
    EXPECT_EQ(bad.finish(), 2) << join(words, " ");
    EXPECT_EQ(bad.out, "");
    EXPECT_THAT(bad.err, HasSubstr(message));
    EXPECT_EQ(lines_of(bad.err).size(), 1u) << bad.err;
  }
}

TEST_F(Operation, DoctorLooksAtThisMachine) {
  Process doctor({kMusterCommand, "doctor", "--json"});
  const int status = doctor.finish();
  const auto findings = json::parse(doctor.out);
  std::map<std::string, json> by_name;
  bool bad = false;
  for (const auto& finding : findings) {
    by_name[finding["name"]] = finding;
    bad = bad || finding["verdict"] == "bad";
    EXPECT_EQ(finding["advice"] == "", finding["verdict"] == "good") << finding;
  }
  EXPECT_EQ(status, bad ? 1 : 0);
  for (const char* name : {"muster", "system", "cores", "memory", "open files", "kernel", "backends", "libtorch"})
    EXPECT_TRUE(by_name.contains(name)) << name;
  EXPECT_EQ(by_name["kernel"]["verdict"], "good");
  // With a limit of its own it sees that.
  Process limited({"/bin/sh", "-c", text("ulimit -n 100; ulimit -v 8000000; ", kMusterCommand, " doctor")});
  EXPECT_EQ(limited.finish(), 1) << limited.out;
  EXPECT_THAT(limited.out, HasSubstr("7 ranks can run"));
  EXPECT_THAT(limited.out, ContainsRegex("address space +bad"));
}

}  // namespace
}  // namespace muster::test
