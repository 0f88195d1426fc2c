// What the campaigns of faults have in common: their settings, and what a job may leave on the machine.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <string>

#include "multiprocess/job_test.h"
#include "muster/base/deadline.h"

namespace muster::test {

inline int number(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}

// Of MUSTER_CAMPAIGN_SEED, or another each time.
inline int campaign_seed() {
  return number("MUSTER_CAMPAIGN_SEED", static_cast<int>(std::random_device()() % 1'000'000));
}

// Sockets of Muster in the abstract namespace, and what lies in the folder for temporary files.
inline std::set<std::string> traces() {
  std::set<std::string> found;
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);)
    if (const auto at = line.find("@muster-"); at != std::string::npos) found.insert(line.substr(at));
  for (const auto& folder : {std::filesystem::temp_directory_path(), std::filesystem::path("/dev/shm")})
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      if (entry.path().filename().string().find("muster") != std::string::npos) found.insert(entry.path().string());
  return found;
}

// What a job left that was not there `before` it, after the time that it may take.
inline void expect_no_traces_but(const std::set<std::string>& before) {
  auto after = traces();
  for (const auto patience = Deadline::after(seconds(5)); after != before && !patience.passed(); after = traces())
    ::poll(nullptr, 0, 5);
  for (const auto& trace : after) EXPECT_TRUE(before.count(trace)) << trace << " is left";
}

}  // namespace muster::test
