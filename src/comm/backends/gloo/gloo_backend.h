// The gloo backend: libtorch's ProcessGroupGloo as a Wire. Ranks anywhere that TCP reaches.
//
// Only its messages are used: they are done by Gloo's event loop, without a worker thread in between, and Muster's
// collectives over them (wire_backend.h) have what Gloo's lack: all dtypes and reductions, the same bits everywhere,
// ranks that disagree are told.
//
// Which interface: GLOO_SOCKET_IFNAME where it is set; else the one by which MASTER_ADDR is reached; else, where all
// members are on this host, the loopback.
#pragma once

#include "comm/backend.h"

namespace muster::comm::gloo_backend {

// Timeout where not all ranks came.
c10::intrusive_ptr<Backend> create(const BackendContext& context);
std::string why_not();

}  // namespace muster::comm::gloo_backend
