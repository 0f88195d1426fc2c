// Which job is this process part of? Read from what launchers leave in the environment; see init() in world.h for the
// order.
#pragma once

#include <memory>
#include <string>

#include "muster/base/deadline.h"
#include "muster/comm/world.h"
#include "muster/store/store.h"

namespace muster::comm {

struct Job {
  Placement placement;
  std::shared_ptr<Store> store;
  std::string started_by;  // "muster run", "env://", "mpirun", "srun" or "" (alone)
};

// Errors: InvalidArgument, naming the variable; Unavailable, a store that nobody serves.
Job join_job(Deadline deadline);

}  // namespace muster::comm
