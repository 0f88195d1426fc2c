// Objects: values that are not tensors, such as a rank's report or the settings that one rank has read.
//
//   muster run -n 2 tutorial_objects
#include <muster/comm/objects.h>
#include <muster/comm/world.h>

#include <cstdio>
#include <string>
#include <vector>

struct Report {
  int rank = 0;
  std::string mood;
  std::vector<double> losses;
  MSGPACK_DEFINE(rank, mood, losses);
};

int main() {
  auto world = muster::init();
  const int rank = world.rank();

  // All ranks get what rank 0 has (from a file, for example).
  const auto steps = muster::broadcast_object(rank == 0 ? std::vector<int>{1, 10, 100} : std::vector<int>());

  // Rank 0 gets one report per rank. Reports may differ in length.
  Report mine{.rank = rank, .mood = rank == 0 ? "fine" : "busy"};
  for (int i = 0; i <= rank; ++i) mine.losses.push_back(1.0 / steps[static_cast<size_t>(i) % steps.size()]);
  for (const auto& report : muster::gather_object(mine))
    std::printf("rank %d is %s, its last loss %g\n", report.rank, report.mood.c_str(), report.losses.back());
}
