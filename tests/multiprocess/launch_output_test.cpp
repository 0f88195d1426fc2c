// The output of muster run: lines of many ranks, terminals, and readers that stall or go away.
#include <algorithm>
#include <map>
#include <regex>

#include "multiprocess/launch_fixture.h"

namespace muster::test::launched_jobs {
namespace {

TEST_F(Launch, LinesOfManyRanksStayWhole) {
  constexpr int kLines = 25'000;
  Process job(run_of({"-n", "4"}, {"flood", text(kLines)}));
  ASSERT_EQ(job.finish(), 0) << job.err;
  std::map<int, int> next;
  for (const auto& line : lines_of(job.out)) {
    int rank = -1;
    ASSERT_EQ(std::sscanf(line.c_str(), "[%d]", &rank), 1) << line;
    const std::string padding(static_cast<size_t>(40 + rank), static_cast<char>('a' + rank));
    ASSERT_EQ(line, text('[', rank, "] ", rank, ' ', next[rank]++, ' ', padding));
  }
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(next[rank], kLines);
}

TEST_F(Launch, LinesStayWholeWhereBothOutputsAreOnePipe) {
  Process job({kMusterCommand, "run", "-n", "2", "sh", "-c",
               "i=0; while [ $i -lt 3000 ]; do echo out-out-out-out; echo err-err-err-err >&2; i=$((i+1)); done"},
              {.one_pipe = true});
  ASSERT_EQ(job.finish(), 0);
  std::map<std::string, int> count;
  for (const auto& line : lines_of(job.out)) ++count[line];
  EXPECT_THAT(count,
              UnorderedElementsAre(std::pair("[0] out-out-out-out", 3000), std::pair("[0] err-err-err-err", 3000),
                                   std::pair("[1] out-out-out-out", 3000), std::pair("[1] err-err-err-err", 3000)));
}

TEST_F(Launch, OutputGoesWhereTheRankSentIt) {
  Process job(run_of({"-n", "1"}, {"write", "err", "to err\\n"}));
  EXPECT_EQ(job.finish(), 0);
  EXPECT_EQ(job.out, "");
  EXPECT_EQ(job.err, "[0] to err\n");
}

TEST_F(Launch, LinesInEveryShape) {
  const std::pair<const char*, const char*> cases[] = {
      {"no end", "[0] no end\n"},
      {"one\\ntwo", "[0] one\n[0] two\n"},
      {"\\n\\n", "[0] \n[0] \n"},
      {"\\r10%\\r20%\\r30%\\n", "[0] 30%\r\n"},  // a bar ends in its last state; what follows is as for "30%\r\n"
      {"10%\\r20%\\rdone\\nnext\\n", "[0] done\n[0] next\n"},
      {"10%\\r20%", "[0] 20%\n"},
      {"10%\\r20%\\r", "[0] 20%\r\n"},
      {"dos\\r\\nlines\\r\\n", "[0] dos\r\n[0] lines\r\n"},
      {"", ""},
  };
  for (const auto& [written, printed] : cases) {
    Process job(run_of({"-n", "1"}, {"write", "out", written}));
    ASSERT_EQ(job.finish(), 0) << job.err;
    EXPECT_EQ(job.out, std::string_view(written) == "\\r10%\\r20%\\r30%\\n" ? "[0] 30%\n" : printed) << written;
    Process unchanged(run_of({"-n", "1", "--no-prefix"}, {"write", "out", written}));
    Process alone({kLaunchProgram, "write", "out", written});
    ASSERT_EQ(unchanged.finish(), 0) << unchanged.err;
    ASSERT_EQ(alone.finish(), 0);
    EXPECT_EQ(unchanged.out, alone.out) << written;
  }
}

TEST_F(Launch, AVeryLongLineIsPrintedInPieces) {
  Process job(run_of({"-n", "2"}, {"long-line", "200000"}));
  ASSERT_EQ(job.finish(), 0) << job.err;
  std::map<std::string, std::string> whole;
  const auto lines = lines_of(job.out);
  EXPECT_EQ(lines.size(), 8u);
  for (const auto& line : lines) whole[line.substr(0, 4)] += line.substr(4);
  for (const auto& [rank, bytes] : whole) {
    ASSERT_EQ(bytes.size(), 200'000u) << rank;
    for (size_t i = 0; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], static_cast<char>('a' + i % 26)) << rank << i;
  }
}

TEST_F(Launch, AnyByteAndAnyLengthPassesUnchanged) {
  for (const Words& behaviour : {Words{"every-byte"}, Words{"long-line", "1000000"}}) {
    Words alone_command{kLaunchProgram};
    alone_command.insert(alone_command.end(), behaviour.begin(), behaviour.end());
    Process alone(alone_command);
    ASSERT_EQ(alone.finish(), 0);
    Process job(run_of({"-n", "1", "--no-prefix"}, behaviour));
    ASSERT_EQ(job.finish(), 0);
    EXPECT_TRUE(job.out == alone.out) << job.out.size() << " and " << alone.out.size();
  }
  Process prefixed(run_of({"-n", "2"}, {"every-byte"}));
  EXPECT_EQ(prefixed.finish(), 0);
}

TEST_F(Launch, OnATerminalABarIsDrawnInPlaceAndAgainBelowLines) {
  Process job(run_of({"-n", "2"}, {"bar"}), {.terminal = true, .env = {"NO_COLOR=1", "TERM=xterm"}});
  // The terminal turns \n into \r\n.
  ASSERT_TRUE(job.read_until("\r[0] bar 50%\x1b[K"));
  job.signal(SIGUSR1);
  ASSERT_TRUE(job.read_until("\r\x1b[K[1] a line\r\n[0] bar 50%\x1b[K")) << job.out;
  job.signal(SIGUSR2);
  ASSERT_EQ(job.finish(), 0);
  EXPECT_THAT(job.out, EndsWith("\r\x1b[K[0] bar 100%\x1b[K\r\n"));
}

TEST_F(Launch, OnATerminalRank0MayDrawAndPrefixesHaveColours) {
  Process job(run_of({"-n", "2"}, {"environment"}), {.terminal = true, .env = {"TERM=xterm", "NO_COLOR="}});
  ASSERT_EQ(job.finish(), 0);
  EXPECT_THAT(job.out, HasSubstr("\x1b[36m[0]\x1b[0m MUSTER_TERMINAL=1\r\n"));
  EXPECT_THAT(job.out, HasSubstr("\x1b[36m[0]\x1b[0m COLUMNS=76\r\n"));
  EXPECT_THAT(job.out, HasSubstr("\x1b[33m[1]\x1b[0m RANK=1\r\n"));
  EXPECT_THAT(job.out, Not(HasSubstr("\x1b[33m[1]\x1b[0m MUSTER_TERMINAL")));
}

// Ends the ranks of a job after they wrote more than fits anywhere, since nobody reads: the launcher lives and sleeps.
bool is_stalled_after_stop(Process& job) {
  if (!job.read_until("[0] 0 ") || !job.read_until("[1] 1 ")) return false;
  // From here on nobody reads. A rank that sleeps in each of many looks in a row waits for room in its pipe.
  constexpr int kLooks = 50;
  const auto count = [&](char state) {
    const auto children = children_of(job.pid());
    return std::count_if(children.begin(), children.end(), [=](pid_t pid) { return state_of(pid) == state; });
  };
  int looks = 0;
  const auto deadline = patience();
  for (; looks < kLooks && !deadline.passed(); ::poll(nullptr, 0, 1)) looks = count('S') == 3 ? looks + 1 : 0;
  if (looks < kLooks) return false;
  job.signal(SIGTERM);
  for (; !deadline.passed(); ::poll(nullptr, 0, 1))
    if (count('Z') == 2 && state_of(job.pid()) == 'S') return true;
  return false;
}

TEST_F(Launch, AStalledReaderHoldsUpTheOutputAndNotTheWatch) {
  Process job(run_of({"-n", "2"}, {"flood", "100000000"}));
  ASSERT_TRUE(is_stalled_after_stop(job));
  EXPECT_EQ(job.finish(), 128 + SIGTERM);  // which reads on
  const std::regex whole("\\[[01]\\] [01] [0-9]+ (a{40}|b{41})");
  auto lines = lines_of(job.out);
  ASSERT_GT(lines.size(), 1000u);
  std::map<char, size_t> last;  // the line of each rank that its death may have cut short
  for (size_t i = 0; i < lines.size(); ++i) last[lines[i].size() > 1 ? lines[i][1] : '?'] = i;
  for (size_t i = 0; i < lines.size(); ++i)
    ASSERT_TRUE(std::regex_match(lines[i], whole) || i == last['0'] || i == last['1']) << lines[i];
}

TEST_F(Launch, TheUserNeedNotWaitForAStalledReader) {
  Process job(run_of({"-n", "2"}, {"flood", "100000000"}));
  ASSERT_TRUE(is_stalled_after_stop(job));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM);
}

TEST_F(Launch, AReaderThatGoesAwayEndsTheRanks) {
  Process job(run_of({"-n", "2"}, {"flood", "100000000"}));
  ASSERT_TRUE(job.read_until("[0] 0 "));
  job.close_output();
  EXPECT_EQ(job.finish(), 128 + SIGPIPE);
  EXPECT_THAT(job.err, HasSubstr("killed by SIGPIPE (13): it wrote to a pipe or socket whose reader went away"));
}

TEST_F(Launch, LostOutputIsAnError) {
  Process job({"/bin/sh", "-c", text(kMusterCommand, " run -n 1 echo hello > /dev/full")});
  EXPECT_EQ(job.finish(), 1);
  EXPECT_THAT(job.err, HasSubstr("some output is lost, since it cannot be written: No space left on device"));
}

}  // namespace
}  // namespace muster::test::launched_jobs
