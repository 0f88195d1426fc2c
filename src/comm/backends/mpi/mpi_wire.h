// What libmuster_mpi.so gives: a function by this name, found with dlsym().
#pragma once

#include <memory>

#include "comm/backend.h"
#include "comm/wire.h"

namespace muster::comm::mpi_backend {

inline constexpr const char* kMakeWire = "muster_make_mpi_wire_1";

// Every member of the group calls it. `world_rank`: of each member in MPI_COMM_WORLD. Unavailable where MPI cannot
// serve several threads, or was started by nobody.
using MakeWire = std::unique_ptr<Wire> (*)(const BackendContext& context);

}  // namespace muster::comm::mpi_backend
