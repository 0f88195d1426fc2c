// The gloo backend: libtorch's ProcessGroupGloo as a Wire, for ranks that reach each other by TCP.
//
// It uses only Gloo's messages. Gloo's event loop handles them without a worker thread in between. Muster's collectives
// over them (wire_backend.h) have what Gloo's lack: all dtypes and reductions, the same bits on all backends, and an
// error when ranks disagree.
//
// The network interface is that of GLOO_SOCKET_IFNAME if it is set; else the one through which this host reaches
// MASTER_ADDR or the store (MUSTER_STORE); else, if all members are on this host, the loopback; else this host's first.
#pragma once

#include "comm/core/backend.h"
#include "comm/core/backend_context.h"

namespace muster::comm::gloo_backend {

// TimeoutError if not all ranks come.
c10::intrusive_ptr<Backend> create(const BackendContext& context);
std::string unavailable_reason();

}  // namespace muster::comm::gloo_backend
