// libmuster_ucx.so, which has all that calls UCX: loaded when the ucx transport is first asked for, so that programs
// that do not use it neither need UCX nor load it. It is built where CMake finds UCX.
//
// Thread-safety: all functions.
#pragma once

#include <memory>
#include <string>

#include "transport/ucx/fabric.h"

namespace muster::transport::ucx {

// Why there is no such library here; empty where there is.
std::string why_not();
// Unavailable where the library is not here, or UCX cannot serve.
std::unique_ptr<Fabric> make_ucx_fabric(const Settings& settings, FabricEvents& events);

}  // namespace muster::transport::ucx
