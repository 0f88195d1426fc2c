// The mpi backend: MPI-3 as a Wire, for ranks that mpirun (or srun with PMI) started.
//
// What calls MPI is a library of its own, libmuster_mpi.so beside this one, which is loaded when the backend is first
// asked for: programs that do not use it neither need an MPI nor load one. It is built where CMake finds an MPI.
#pragma once

#include "comm/backend.h"

namespace muster::comm::mpi_backend {

c10::intrusive_ptr<Backend> create(const BackendContext& context);
std::string why_not();

}  // namespace muster::comm::mpi_backend
