// Finds the job that this process is part of, from the environment variables that launchers set. See init() in world.h
// for the order.
#pragma once

#include <memory>
#include <string>

#include "muster/base/deadline.h"
#include "muster/comm/world.h"
#include "muster/store/store.h"

namespace muster::comm {

struct JoinedJob {
  Placement placement;
  std::shared_ptr<Store> store;
  std::string started_by;  // "muster run", "env://", "mpirun", "srun" or "" (alone)
};

// Errors: InvalidArgument names the variable; Unavailable if nobody serves the store.
JoinedJob join_job(Deadline deadline);

}  // namespace muster::comm
