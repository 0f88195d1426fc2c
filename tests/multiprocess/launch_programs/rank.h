// What the behaviours of launch_program have in common: how a rank asks who it is, and how ranks wait.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "muster/store/store.h"
#include "support/patience.h"

namespace launch_program {

using Arguments = std::vector<std::string>;
using Behaviour = int (*)(const Arguments&);  // returns the process's exit status

inline int number(const char* name) { return std::getenv(name) ? std::atoi(std::getenv(name)) : -1; }
inline int rank() { return number("RANK"); }

inline void say(const std::string& words) { std::cout << words << std::endl; }

// Ends by itself should everything else fail, so that no test can leave it behind for good: after its test has.
inline constexpr int kStays = 2 * std::chrono::seconds(muster::test::kPatience) / std::chrono::seconds(1);
inline int stay() {
  ::poll(nullptr, 0, kStays * 1000);
  return 99;
}

// Waits until all ranks have come here.
inline void meet(const std::string& where) {
  auto store = muster::connect_job_store(muster::test::patience());
  if (store->add("count/" + where, 1) == number("WORLD_SIZE")) store->set("all/" + where, "");
  store->wait({"all/" + where}, muster::test::patience());
}

}  // namespace launch_program
