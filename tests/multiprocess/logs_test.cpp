// muster run --log-dir: every byte in its file, on a full disk too little, and never at the job's cost.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "launch/output/rank_logs.h"
#include "multiprocess/job_test.h"
#include "muster/base/error.h"
#include "muster/launch/launcher.h"

namespace muster::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class Logs : public JobFolderTest {
 protected:
  std::string content(const std::string& name) const {
    std::ifstream file(folder() / name, std::ios::binary);
    EXPECT_TRUE(file.good()) << name;
    return {std::istreambuf_iterator<char>(file), {}};
  }
  const Words print_ = {"sh", "-c", "echo out $RANK; echo err $RANK >&2"};
};

TEST_F(Logs, EachRankAndStreamHasAFileAndTheTerminalHasAll) {
  for (const Words& how : {Words{}, Words{"--tee"}}) {
    Words options{"-n", "2", "--log-dir", path("a/b")};
    options.insert(options.end(), how.begin(), how.end());
    Process job(run_program(options, print_));
    ASSERT_EQ(job.finish(), 0) << job.err;
    for (const int rank : {0, 1}) {
      EXPECT_EQ(content(text("a/b/rank_", rank, ".out")), text("out ", rank, '\n')) << "emptied at the beginning";
      EXPECT_EQ(content(text("a/b/rank_", rank, ".err")), text("err ", rank, '\n'));
      EXPECT_THAT(job.out, HasSubstr(text('[', rank, "] out ", rank, '\n')));
      EXPECT_THAT(job.err, HasSubstr(text('[', rank, "] err ", rank, '\n')));
    }
  }
}

TEST_F(Logs, RedirectedOutputIsInTheFilesAlone) {
  Process job(run_program({"-n", "2", "--log-dir", path("logs"), "--redirect"}, print_));
  ASSERT_EQ(job.finish(), 0);
  EXPECT_EQ(job.out + job.err, "");
  EXPECT_EQ(content("logs/rank_1.out"), "out 1\n");
  EXPECT_EQ(content("logs/rank_1.err"), "err 1\n");
}

// Nobody reads what the launcher prints, but the files still get everything, and the ranks go on.
TEST_F(Logs, AReaderThatGoesAwayDoesNotStopWhatGoesIntoFiles) {
  const std::string waits = text("while ! [ -e ", path("go"), " ]; do sleep 0.01; done");
  Process job(run_program({"-n", "1", "--log-dir", path("logs")},
                          {"sh", "-c", "echo begins; " + waits + "; seq 50000; echo ends"}));
  ASSERT_TRUE(job.read_until("begins"));
  job.close_output();
  std::ofstream(path("go")).put('x');
  job.finish();
  const auto lines = lines_of(content("logs/rank_0.out"));
  ASSERT_EQ(lines.size(), 50'002u);
  EXPECT_EQ(lines.back(), "ends");
}

TEST_F(Logs, TheReportHasTheLastLinesOfWhatWasRedirected) {
  Process job(run_program({"-n", "2", "--log-dir", path("logs"), "--redirect"}, {kLaunchProgram, "fail", "1", "3"}));
  EXPECT_EQ(job.finish(), 3);
  EXPECT_THAT(job.err, Not(HasSubstr("[1]")));
  EXPECT_THAT(job.err, HasSubstr("  | trouble 29\n"));
  EXPECT_EQ(lines_of(content("logs/rank_1.err")).size(), 30u);
}

TEST_F(Logs, FilesHaveEveryByteAsItWas) {
  for (const Words& behaviour :
       {Words{"every-byte"}, Words{"long-line", "1000000"}, Words{"write", "out", "10%\\r20%\\rno end"}}) {
    Words alone{kLaunchProgram};
    alone.insert(alone.end(), behaviour.begin(), behaviour.end());
    Process expected(alone), job(run_program({"-n", "1", "--log-dir", path("logs")}, alone));
    ASSERT_EQ(expected.finish(), 0);
    ASSERT_EQ(job.finish(), 0);
    EXPECT_TRUE(content("logs/rank_0.out") == expected.out) << behaviour[0];
  }
}

TEST_F(Logs, ARankThatIsStartedAgainWritesOn) {
  Process job(
      run_program({"-n", "1", "--max-restarts", "1", "--log-dir", path("logs"), "--error-file", path("error.json")},
                  {"sh", "-c",
                   "echo try $TORCHELASTIC_RESTART_COUNT; echo '{\"message\": \"why\"}' > $TORCHELASTIC_ERROR_FILE; "
                   "test $TORCHELASTIC_RESTART_COUNT = 1"}));
  ASSERT_EQ(job.finish(), 0) << job.err;
  EXPECT_EQ(content("logs/rank_0.out"), "try 0\ntry 1\n");
  EXPECT_THAT(job.err, HasSubstr("\n  error why\n")) << "of the first attempt";
  EXPECT_FALSE(std::filesystem::exists(path("error.json"))) << "the job ended well after all";
  EXPECT_FALSE(std::filesystem::exists(path("error.json.rank_0")));
}

TEST_F(Logs, AFullDiskLosesOutputAndNothingElse) {
  std::filesystem::create_directory(path("logs"));
  std::filesystem::create_symlink("/dev/full", path("logs/rank_1.out"));
  Process job(run_program({"-n", "2", "--log-dir", path("logs")}, {kLaunchProgram, "flood", "2000"}));
  EXPECT_EQ(job.finish(), 0) << "the job did its work";
  EXPECT_EQ(lines_of(job.out).size(), 4000u) << "and was heard";
  EXPECT_EQ(lines_of(content("logs/rank_0.out")).size(), 2000u);
  EXPECT_EQ(lines_of(job.err).size(), 1u) << job.err;
  EXPECT_THAT(job.err,
              ContainsRegex("^muster: [0-9]+ KiB of the ranks' output are lost, since they could not be written "
                            "to '.*': No space left on device\n$"));
}

TEST_F(Logs, AFileThatMayNotGrowDoesNotKillTheLauncher) {
  // 512 KiB for a file, which is more than a black box has. The launcher writes files, the ranks only into pipes.
  const auto command = text("ulimit -f 1024; exec ", kMusterCommand, " run -n 1 --redirect --log-dir ", path("logs"),
                            ' ', kLaunchProgram, " flood 20000");
  Process job({"/bin/sh", "-c", command});
  EXPECT_EQ(job.finish(), 0) << "SIGXFSZ is not for the launcher";
  EXPECT_EQ(content("logs/rank_0.out").size(), 512u * 1024);
  EXPECT_THAT(job.err, HasSubstr("File too large"));
}

TEST_F(Logs, AFifoWithoutReaderDoesNotHoldUpTheLauncher) {
  std::filesystem::create_directory(path("logs"));
  ASSERT_EQ(::mkfifo(path("logs/rank_0.err").c_str(), 0600), 0);
  Process job(run_program({"-n", "1", "--log-dir", path("logs")}, print_));
  EXPECT_EQ(job.finish(Deadline::after(seconds(10))), 2);
  EXPECT_THAT(job.err, HasSubstr("rank_0.err': No such device or address"));
}

TEST_F(Logs, BadInputIsOneSentence) {
  std::ofstream(path("file")) << "in the way";
  const std::pair<Words, const char*> cases[] = {
      {{"--tee"}, "--tee needs a folder"},
      {{"--redirect"}, "--redirect needs a folder"},
      {{"--tee", "--redirect", "--log-dir", path("logs")}, "contradict each other"},
      {{"--log-dir", path("file")}, "cannot make the folder"},
      {{"--log-dir", path("file/below")}, "cannot make the folder"},
  };
  for (const auto& [options, message] : cases) {
    Words all{"-n", "1"};
    all.insert(all.end(), options.begin(), options.end());
    Process job(run_program(all, print_));
    EXPECT_EQ(job.finish(), 2) << join(options, " ");
    EXPECT_EQ(job.out, "");
    EXPECT_THAT(job.err, HasSubstr(message));
    EXPECT_EQ(lines_of(job.err).size(), 1u) << job.err;
  }
}

TEST_F(Logs, FunctionsHaveFilesToo) {
  Process job({kLaunchProgram, "function", "logs", path("logs")});
  EXPECT_EQ(job.finish(), 0) << job.err;
  for (const int rank : {0, 1}) {
    EXPECT_EQ(content(text("logs/rank_", rank, ".out")), text("out of ", rank, '\n'));
    EXPECT_EQ(content(text("logs/rank_", rank, ".err")), text("err of ", rank, '\n'));
  }
}

TEST_F(Logs, AFileGoesOnWhenThereIsRoomAgain) {
  std::filesystem::create_symlink("/dev/full", path("log"));
  launch::LogFile file(path("log"));
  file.append("lost");
  EXPECT_EQ(file.lost(), 4u);
  EXPECT_EQ(file.error(), ENOSPC);
  const UniqueFd room(::open(path("room").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_GE(::dup3(room.get(), file.fd(), O_CLOEXEC), 0);
  file.append("kept");
  EXPECT_EQ(content("room"), "kept");
  EXPECT_EQ(file.lost(), 4u);
}

}  // namespace
}  // namespace muster::test
