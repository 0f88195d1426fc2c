// The interface of libmuster_mpi.so: one function, which is found with dlsym() by its name kMakeWire. Both sides
// include this header. The library is linked with neither Muster nor libtorch; WireContext has all that it needs of
// them. So one library serves programs that link Muster statically, the Python module, and Muster as a shared library.
#pragma once

#include <chrono>
#include <string>

#include "comm/wire/wire.h"
#include "muster/base/deadline.h"
#include "muster/store/store.h"

namespace muster::comm::mpi_backend {

// A group of two or more ranks, as seen from one of them. The members need not be all processes of the job, and need
// not be in MPI's order.
struct WireContext {
  int rank = 0, size = 1;
  std::string group_name;
  std::string prefix;      // unique to the group: the prefix of the store's keys for the members' MPI ranks
  Store* store = nullptr;  // used only while the wire is made
  Deadline deadline = Deadline::never();  // for making the wire
  std::chrono::nanoseconds spin{0};       // how long a wait may spin before it yields
  // These throw TimeoutError("") and Unavailable(what, advice), because only Muster's own code makes Muster's errors.
  void (*timeout)() = nullptr;
  void (*unavailable)(const std::string& what, const std::string& advice) = nullptr;
};

inline constexpr const char* kMakeWire = "muster_make_mpi_wire_2";

// Every member of the group calls it. The first call in a process initialises MPI, which waits for all processes of the
// job, without a deadline. The caller owns the result. TimeoutError if members do not come; Unavailable if MPI cannot
// serve several threads, has been finalized, or was started for other processes.
using MakeWire = Wire* (*)(const WireContext& site);

}  // namespace muster::comm::mpi_backend
