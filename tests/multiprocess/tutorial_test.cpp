// The tutorial's programs, as a reader runs them.
#include <algorithm>
#include <cstdio>
#include <sstream>

#include "multiprocess/launch_support.h"

namespace muster::test {
namespace {

// Standard output of an example on n ranks, its lines sorted.
std::vector<std::string> run_example(const std::string& name, int ranks) {
  Process job(
      {kMusterCommand, "run", "--no-prefix", "-n", std::to_string(ranks), text(kExamplesFolder, "/tutorial_", name)});
  EXPECT_EQ(job.finish(), 0) << job.err;
  std::vector<std::string> lines;
  std::istringstream stream(job.out);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

TEST(Tutorial, Messages) {
  EXPECT_EQ(run_example("messages", 3),
            (std::vector<std::string>{"around the ring: rank 0 has 12", "around the ring: rank 1 has 10",
                                      "around the ring: rank 2 has 11", "blocking: rank 0 has 0",
                                      "blocking: rank 1 has 1", "blocking: rank 2 has 0", "reports: rank 0 has 300"}));
}

TEST(Tutorial, RingAllReduce) {
  for (const int ranks : {1, 2, 4})
    EXPECT_EQ(run_example("ring_all_reduce", ranks), std::vector<std::string>{"the ring agrees with all_reduce"});
}

TEST(Tutorial, Groups) {
  EXPECT_EQ(run_example("groups", 3), (std::vector<std::string>{
                                          "rank 0 is 0 of 2 in its group: sum 4, largest of all 3",
                                          "rank 1 is 0 of 1 in its group: sum 2, largest of all 3",
                                          "rank 2 is 1 of 2 in its group: sum 4, largest of all 3",
                                      }));
}

TEST(Tutorial, Objects) {
  EXPECT_EQ(run_example("objects", 2),
            (std::vector<std::string>{"rank 0 is fine, its last loss 1", "rank 1 is busy, its last loss 0.1"}));
}

// It learns, and on two ranks what it learns on one.
TEST(Tutorial, AverageGradients) {
  double first[2], last[2];
  for (const int ranks : {1, 2}) {
    const auto lines = run_example("average_gradients", ranks);
    ASSERT_EQ(lines.size(), 1u);
    ASSERT_EQ(std::sscanf(lines[0].c_str(), "loss: %lf at first, %lf at last", &first[ranks - 1], &last[ranks - 1]), 2)
        << lines[0];
  }
  EXPECT_LT(last[0], 0.7 * first[0]);
  EXPECT_NEAR(first[0], first[1], 0.002);
  EXPECT_NEAR(last[0], last[1], 0.02);
}

}  // namespace
}  // namespace muster::test
