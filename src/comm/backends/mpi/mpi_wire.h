// What libmuster_mpi.so gives: a function by this name, found with dlsym(). Both sides include this header, and the
// library is linked with neither Muster nor libtorch: what it needs of them is in WireSite. So one library serves
// programs that link Muster statically, the Python module, and Muster as a shared library.
#pragma once

#include <chrono>
#include <string>

#include "comm/wire.h"
#include "muster/base/deadline.h"
#include "muster/store/store.h"

namespace muster::comm::mpi_backend {

// A group of two or more, seen from one of its members. The members need not be all processes of the job, nor in MPI's
// order.
struct WireSite {
  int rank = 0, size = 1;
  std::string group_name;
  std::string prefix;      // unique to the group; of keys in the store, under which members tell their MPI ranks
  Store* store = nullptr;  // used only while the wire is made
  Deadline deadline = Deadline::never();  // for that
  std::chrono::nanoseconds spin{0};       // how long a wait may spin before it yields
  // Throw Timeout("") and Unavailable(what, advice): Muster's errors are made by Muster.
  void (*timeout)() = nullptr;
  void (*unavailable)(const std::string& what, const std::string& advice) = nullptr;
};

inline constexpr const char* kMakeWire = "muster_make_mpi_wire_2";

// Every member of the group calls it. The first call in a process initialises MPI, which waits for all processes of the
// job, and knows no deadline. The caller owns the result. Timeout where members do not come; Unavailable where
// MPI cannot serve several threads, has ended, or joins other processes.
using MakeWire = Wire* (*)(const WireSite& site);

}  // namespace muster::comm::mpi_backend
