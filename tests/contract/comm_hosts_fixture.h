// What the tests of ranks on several hosts have in common.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/core/backend.h"
#include "comm/world/world_starter.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test::faked_hosts {

using Hosts = std::vector<std::string>;  // by rank

inline WorldOptions options_of(std::string backend = "auto", FaultPlan faults = {}) {
  return {.backend = std::move(backend), .timeout = kPatience, .faults = std::move(faults)};
}

// The body in a thread for each rank.
inline void run_on(const Hosts& hosts, const std::function<void(World&)>& body,
                   const WorldOptions& options = options_of()) {
  comm::WorldStarter(hosts).run_threads(static_cast<int>(hosts.size()), body, options);
}

}  // namespace muster::test::faked_hosts
