// muster blackbox on jobs that run, stand still and have died.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>

#include "multiprocess/job_test.h"

namespace muster::test {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

Words job_of(int ranks, const std::string& how, Words options = {}) {
  Words command{kMusterCommand, "run", "-n", text(ranks)};
  command.insert(command.end(), options.begin(), options.end());
  for (const auto& word : {std::string(kLaunchProgram), std::string("black-box"), how}) command.push_back(word);
  return command;
}

std::string variable_of(pid_t pid, const std::string& name) {
  std::ifstream file(text("/proc/", pid, "/environ"));
  for (std::string entry; std::getline(file, entry, '\0');)
    if (entry.starts_with(name + '=')) return entry.substr(name.size() + 1);
  return {};
}

// The ranks of a job, which are children of its launcher, as its guardian is.
std::map<int, pid_t> ranks_of(pid_t launcher) {
  std::map<int, pid_t> ranks;
  for (const pid_t child : children_of(launcher))
    if (const auto rank = variable_of(child, "RANK"); !rank.empty()) ranks[std::stoi(rank)] = child;
  return ranks;
}

class BlackBoxCommand : public JobFolderTest {
 protected:
  // What `muster blackbox words…` prints; it must succeed.
  static std::string look(const Words& words) {
    Words command{kMusterCommand, "blackbox"};
    command.insert(command.end(), words.begin(), words.end());
    Process looker(command);
    EXPECT_EQ(looker.finish(), 0) << looker.err;
    EXPECT_EQ(looker.err, "");
    return looker.out;
  }

  // A job of two ranks, of which the last was killed in operation #5. Its boxes are in `name`.
  std::string report_of_dead_job(const std::string& name) const {
    Process job(job_of(2, "die", {"--black-box", path(name)}));
    EXPECT_EQ(job.finish(), 128 + SIGKILL);
    return job.err;
  }
};

TEST_F(BlackBoxCommand, ReadsAJobThatStandsStillFromOutside) {
  Process job(job_of(3, "stall"));
  ASSERT_TRUE(all_ready(job, 3)) << job.err;
  const auto ranks = ranks_of(job.pid());
  ASSERT_EQ(ranks.size(), 3u);
  const auto id = variable_of(ranks.at(0), "MUSTER_JOB_ID");
  for (const Words& words : {Words{"--pid", text(job.pid())}, Words{"--pid", text(ranks.at(2))}, Words{"--job", id},
                             Words{"--job", id.substr(0, 12)}}) {
    const auto out = look(words);
    EXPECT_THAT(out, StartsWith(text("job ", id, " on ")));
    for (const auto& [rank, pid] : ranks)
      EXPECT_THAT(out, ContainsRegex(
                           text("rank ", rank, " of 3  pid ", pid, " +running  ", rank == 0 ? 7 : 6, " operations\n")));
    EXPECT_THAT(out, ContainsRegex("-[0-9.]+ +0  world  4  all_reduce +1.2 MiB +[0-9.]+ [nµm]*s  done\n"));
    EXPECT_THAT(out, ContainsRegex("-[0-9.]+ +0  world  5  all_reduce +1.2 MiB +[0-9.]+ [nµm]*s  running\n"));
    EXPECT_THAT(out, ContainsRegex("-[0-9.]+ +2  pipe +-  recv \\(peer 0, tag 7\\) +8 B +[0-9.]+ [nµm]*s  running\n"));
    EXPECT_THAT(out,
                ContainsRegex("group 'world' of 3 ranks:\n"
                              "  rank 0: all_reduce #5, 1.2 MiB, running for [0-9.]+ [nµm]*s\n"
                              "  ranks 1, 2: all_reduce #4, 1.2 MiB, done [0-9.]+ [nµm]*s ago\n"
                              "  => ranks 1, 2 have not begun all_reduce #5, for which rank 0 waits\n"
                              "  => rank 1 \\(running\\) is in recv \\(peer 0, tag 7\\) of group 'pipe', running"));
  }
  const auto out = look({"--pid", text(job.pid()), "--last", "1"});
  EXPECT_THAT(out, Not(HasSubstr("  done\n")));
  EXPECT_THAT(look({"--pid", text(job.pid()), "--last", "0"}), Not(HasSubstr("seconds")));

  ::kill(ranks.at(1), SIGSTOP);
  for (const auto deadline = patience(); state_of(ranks.at(1)) != 'T' && !deadline.passed();) ::poll(nullptr, 0, 1);
  EXPECT_THAT(look({"--pid", text(job.pid())}), HasSubstr("=> rank 1 (stopped) is in recv"));
  ::kill(ranks.at(1), SIGCONT);
  job.signal(SIGTERM);
  EXPECT_EQ(job.finish(), 128 + SIGTERM);
}

TEST_F(BlackBoxCommand, AsksWhichOfSeveralJobs) {
  Process one(job_of(1, "stall")), other(job_of(1, "stall"));
  ASSERT_TRUE(all_ready(one, 1) && all_ready(other, 1));
  Process looker({kMusterCommand, "blackbox"});
  EXPECT_EQ(looker.finish(), 2);
  EXPECT_THAT(looker.err, StartsWith("muster: several jobs run here: "));
  for (const auto* job : {&one, &other})
    EXPECT_THAT(looker.err, HasSubstr(variable_of(ranks_of(job->pid()).at(0), "MUSTER_JOB_ID")));
  for (auto* job : {&one, &other}) {
    job->signal(SIGTERM);
    EXPECT_EQ(job->finish(), 128 + SIGTERM);
  }
}

TEST_F(BlackBoxCommand, ReadsARankWithoutALauncher) {
  Process rank({kLaunchProgram, "black-box", "alone"}, {.env = {"RANK=0", "WORLD_SIZE=1"}});
  ASSERT_TRUE(rank.read_until("ready"));
  const auto out = look({"--pid", text(rank.pid())});
  EXPECT_THAT(out, ContainsRegex(text("rank 0 of 1  pid ", rank.pid(), "  running  7 operations\n")));
  EXPECT_THAT(out, HasSubstr("=> all are in all_reduce #5: nobody is missing"));
  rank.signal(SIGKILL);
  EXPECT_EQ(rank.wait(), 1000 + SIGKILL);
  Process looker({kMusterCommand, "blackbox", "--pid", text(rank.pid())});
  EXPECT_EQ(looker.finish(), 2) << "its box went with it";
}

TEST_F(BlackBoxCommand, TheBoxReachesAProgramThroughAShell) {
  Process job({kMusterCommand, "run", "-n", "1", "/bin/sh", "-c", text(kLaunchProgram, " black-box stall; exit $?")});
  ASSERT_TRUE(all_ready(job, 1));
  EXPECT_THAT(look({"--pid", text(job.pid())}), ContainsRegex("rank 0 of 1  pid [0-9]+  running  7 operations"));
  job.signal(SIGKILL);
  EXPECT_EQ(job.wait(), 1000 + SIGKILL);
}

TEST_F(BlackBoxCommand, AKilledRanksLastOperationsAreInTheReport) {
  const auto report = report_of_dead_job("boxes");
  EXPECT_THAT(report, ContainsRegex("^muster: rank 1 \\(pid [0-9]+\\) killed by SIGKILL \\(9\\): .*\n"
                                    "  its last operations:\n"
                                    "  \\| all_reduce #3 of group 'world', 1.2 MiB, done [0-9.]+ [nµm]*s ago\n"
                                    "  \\| all_reduce #4 of group 'world', 1.2 MiB, done [0-9.]+ [nµm]*s ago\n"
                                    "  \\| all_reduce #5 of group 'world', 1.2 MiB, running for [0-9.]+ [nµm]*s\n"
                                    "what the ranks did last: muster blackbox .*/boxes\n"));
}

TEST_F(BlackBoxCommand, ReadsTheFileOfADeadJob) {
  report_of_dead_job("boxes");
  EXPECT_FALSE(std::filesystem::exists(path("boxes.part")));
  const auto out = look({path("boxes"), "--perfetto", path("trace.json")});
  EXPECT_THAT(out, ContainsRegex("  rank 0 of 2  pid [0-9]+  killed by SIGTERM \\(15\\)  6 operations\n"
                                 "  rank 1 of 2  pid [0-9]+  killed by SIGKILL \\(9\\)   6 operations\n"));
  EXPECT_THAT(out, ContainsRegex("group 'world' of 2 ranks:\n"
                                 "  ranks 0, 1: all_reduce #5, 1.2 MiB, running for [0-9.]+ [nµm]*s\n"
                                 "  => all are in all_reduce #5: nobody is missing\n"));

  std::ifstream file(path("trace.json"));
  const auto trace = json::parse(file);
  std::map<std::string, int> count;
  for (const auto& event : trace.at("traceEvents")) {
    const auto phase = event.at("ph").get<std::string>();
    ++count[phase];
    if (phase != "X") continue;
    EXPECT_EQ(event.at("name"), "all_reduce");
    EXPECT_EQ(event.at("tid"), 1);
    EXPECT_GE(event.at("ts").get<double>(), 0);
    EXPECT_EQ(event.at("args").at("bytes"), 1'258'291);
    EXPECT_EQ(event.at("args").at("dtype"), "Float");
    EXPECT_EQ(event.at("args").at("state"), event.at("args").at("sequence") == 5 ? "running" : "done");
  }
  EXPECT_EQ(count, (std::map<std::string, int>{{"M", 6}, {"X", 12}})) << "2 ranks with 2 groups and 6 operations each";
}

TEST_F(BlackBoxCommand, AJobThatTheUserStopsLeavesAFileAndOneThatEndsWellNone) {
  Process stalled(job_of(2, "stall", {"--black-box", path("stalled")}));
  ASSERT_TRUE(all_ready(stalled, 2));
  stalled.signal(SIGINT);
  EXPECT_EQ(stalled.finish(), 128 + SIGINT);
  EXPECT_EQ(stalled.err, text("muster: the job was ended by SIGINT (2)\nwhat the ranks did last: muster blackbox ",
                              path("stalled"), '\n'));
  EXPECT_THAT(look({path("stalled")}), HasSubstr("=> rank 1 has not begun all_reduce #5, for which rank 0 waits\n"
                                                 "  => rank 1 (killed by SIGINT (2)) is in recv"));

  std::ofstream(path("well")) << "MUSTERBX of a job before";
  Process well(job_of(2, "end", {"--black-box", path("well")}));
  EXPECT_EQ(well.finish(), 0) << well.err;
  EXPECT_EQ(well.err, "");
  EXPECT_FALSE(std::filesystem::exists(path("well")));

  Process at_last(run_of({"-n", "2", "--max-restarts", "1", "--black-box", path("at-last")}, {"fail-until", "1", "0"}));
  EXPECT_EQ(at_last.finish(), 0) << at_last.err;
  EXPECT_THAT(at_last.err, HasSubstr("the job starts again (1 of 1)"));
  EXPECT_FALSE(std::filesystem::exists(path("at-last")));

  Process no_muster({kMusterCommand, "run", "-n", "2", "--black-box", path("none"), "false"});
  EXPECT_EQ(no_muster.finish(), 1);
  EXPECT_THAT(no_muster.err, Not(HasSubstr("last operations")));
  EXPECT_THAT(look({path("none")}),
              ContainsRegex("rank . of 2 +exited with status 1 +0 operations"));  // the first; the other may be ended

  std::filesystem::create_directory(path("folder"));
  Process unwritable(job_of(2, "die", {"--black-box", path("folder")}));
  EXPECT_EQ(unwritable.finish(), 2);
  EXPECT_THAT(unwritable.err, HasSubstr("for the black boxes: a folder has this name"));
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(path("folder")).parent_path()))
    EXPECT_FALSE(entry.path().string().ends_with(".tmp")) << entry.path();
}

TEST_F(BlackBoxCommand, BadInputIsOneSentenceAndStatus2) {
  report_of_dead_job("boxes");
  std::ifstream file(path("boxes"), std::ios::binary);
  const std::string good((std::istreambuf_iterator<char>(file)), {});
  const auto write = [&](const char* name, const std::string& bytes) {
    std::ofstream(path(name), std::ios::binary) << bytes;
  };
  write("empty", "");
  write("text", "no box\n");
  write("short", good.substr(0, good.size() - 1));
  write("long", good + '!');
  auto flipped = good;
  flipped[8] ^= 64;
  write("format", flipped);
  flipped = good;
  flipped[24] ^= 64;
  write("count", flipped);
  flipped = good;
  flipped[flipped.find("BLACKBOX")] = 'C';
  write("magic", flipped);

  const std::pair<Words, const char*> cases[] = {
      {{path("nowhere")}, "'.*/nowhere' cannot be read: No such file"},
      {{path(".")}, "'.*' cannot be read: it is a folder"},
      {{path("empty")}, "'.*/empty' is not a file of black boxes: it does not begin with MUSTERBX"},
      {{path("text")}, "'.*/text' is not a file of black boxes"},
      {{path("short")}, "a message is shorter than it says"},
      {{path("long")}, "a message has bytes after its end"},
      {{path("format")}, "it has format 65, and this Muster reads format 1"},
      {{path("count")}, "'.*/count' is not a file of black boxes"},
      {{path("magic")}, "a black box does not begin with its magic number"},
      {{"--pid", "self"}, "--pid: expected a whole number of at most 2147483647, got 'self'"},
      {{"--pid", "-1"}, "got '-1'|needs a value"},
      {{"--pid", "1"}, "process 1 has no black box"},
      {{"--pid", text(::getpid())}, "process [0-9]+ has no black box"},
      {{"--pid"}, "--pid needs a value"},
      {{"--job", "nobody's"}, "no job 'nobody's' runs here"},
      {{"--job", "a", "--pid", "1"}, "exclude each other"},
      {{path("boxes"), "--last", "many"}, "got 'many'"},
      {{path("boxes"), "--last", "4097"}, "at most 4096"},
      {{path("boxes"), "--perfetto", path("nowhere/trace")}, "cannot write to '.*/nowhere/trace'"},
      {{path("boxes"), "another"}, "there is no option another"},
      {{"--bogus"}, "there is no option --bogus"},
  };
  for (const auto& [words, message] : cases) {
    Words command{kMusterCommand, "blackbox"};
    command.insert(command.end(), words.begin(), words.end());
    Process looker(command);
    EXPECT_EQ(looker.finish(), 2) << join(words, " ");
    EXPECT_THAT(looker.err, AllOf(StartsWith("muster: "), ContainsRegex(message)));
    EXPECT_EQ(lines_of(looker.err).size(), 1u) << looker.err;
  }
  Process no_folder(job_of(1, "end", {"--black-box", path("nowhere/boxes")}));
  EXPECT_EQ(no_folder.finish(), 2);
  EXPECT_THAT(no_folder.err, ContainsRegex("^muster: cannot make the file '.*/nowhere/boxes' for the black boxes: "
                                           "there is no folder '.*/nowhere'. Choose .*\n$"));
}

}  // namespace
}  // namespace muster::test
