// What a worker has sent to other workers and received from them since rpc::init(). Shows what a step costs.
//
//   const rpc::Traffic before = rpc::traffic();
//   step();
//   const rpc::Traffic one = rpc::traffic() - before;   // calls, and bytes each way
//
// Bytes are those of whole messages as the transport gets them: headers, arguments or results, tensors. They include
// replies, and the messages that agents exchange. A tensor that is handed over in shared memory counts as any other,
// though its bytes do not move. What a transport adds (TLS, frames) does not count, and neither do messages of a worker
// to itself. Calls are requests: a result is not one, but the backward of a remote call is, and so is the end of a
// context (muster/autograd/context.h).
//
// When a call has returned, its caller has counted it and its answer; the callee may not have counted them yet. Errors:
// Aborted if RPC is not running. Thread-safety: any thread; each number only grows, but they are not all read at the
// same moment.
#pragma once

#include <cstdint>

namespace muster::rpc {

struct Traffic {
  uint64_t calls = 0;
  uint64_t bytes_sent = 0, bytes_received = 0;

  friend Traffic operator-(const Traffic& a, const Traffic& b) {
    return {a.calls - b.calls, a.bytes_sent - b.bytes_sent, a.bytes_received - b.bytes_received};
  }
};

Traffic traffic();

}  // namespace muster::rpc
