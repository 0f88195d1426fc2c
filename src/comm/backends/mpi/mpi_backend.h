// The mpi backend: MPI-3 as a Wire, for ranks that mpirun (or srun with PMI) started.
//
// The code that calls MPI is in a separate library, libmuster_mpi.so beside this one. It is loaded when the backend is
// first used, so programs that do not use it neither need an MPI nor load one. It is built if CMake finds an MPI.
#pragma once

#include "comm/core/backend.h"
#include "comm/core/backend_context.h"

namespace muster::comm::mpi_backend {

c10::intrusive_ptr<Backend> create(const BackendContext& context);
std::string unavailable_reason();

}  // namespace muster::comm::mpi_backend
