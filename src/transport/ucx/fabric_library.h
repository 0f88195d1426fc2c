// libmuster_ucx.so, which contains all code that calls UCX. It is loaded when the ucx transport is first used, so that
// other programs neither need UCX nor load it. It is built if CMake finds UCX.
//
// Thread-safety: all functions.
#pragma once

#include <memory>
#include <string>

#include "transport/ucx/fabric.h"

namespace muster::transport::ucx {

// Why the library cannot be used; empty if it can.
std::string unavailable_reason();
// Throws Unavailable if the library is missing, or if UCX cannot be used.
std::unique_ptr<Fabric> make_ucx_fabric(const Settings& settings, FabricEvents& events);

}  // namespace muster::transport::ucx
