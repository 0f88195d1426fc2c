// What the layer above (autograd/) adds to calls. An agent has one Interceptor and knows nothing else of that layer.
//
//   caller                                               callee
//   outgoing()  adds references, a note, a context  ──>  incoming()   before the arguments are unpacked
//                                                        the handler runs; it finds what incoming() gave back in
//                                                        IncomingCall::above
//   returned()  before the result is unpacked       <──  returning()  before the result is sent; not for errors, nor
//                                                        for results that are stored
//
// Each method sees the tensors of the message (Payload::tensors), in the same order on both sides, and may replace
// them. The note (Payload::note) travels beside them; Header::context travels too, and is only for the layer above.
//
// A call without tensors and outside of any context costs a virtual call and a look at a thread-local.
//
// Thread-safety: all methods, concurrently. What they throw ends the call: outgoing() throws to the calling code; what
// incoming() and returning() throw is the call's error at the caller; what returned() throws becomes its result. What
// ended() throws is logged.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "muster/rpc/payload.h"

namespace muster::rpc {

class Agent;
struct IncomingCall;

class Interceptor {
 public:
  virtual ~Interceptor() = default;

  // `timeout`: the call's own, if it has one. Returns what returned() is to be given; may be null.
  using Timeout = std::optional<std::chrono::milliseconds>;
  virtual std::shared_ptr<void> outgoing(int to, Timeout timeout, Payload& payload, uint64_t& context) = 0;
  // The call has waited for room, and is sent now. Throws if it must not be any more.
  virtual void about_to_send(uint64_t context) = 0;
  virtual void returned(const std::shared_ptr<void>& sent, int from, uint64_t context, Payload& payload) = 0;

  virtual std::shared_ptr<void> incoming(const IncomingCall& call, Payload& payload) = 0;
  virtual void returning(const IncomingCall& call, Payload& payload, uint64_t& context) = 0;

  virtual void ended(uint64_t context) = 0;  // Agent::tell_end() was called for it on another worker
  virtual void lost(int worker) = 0;         // no more messages come from it
  virtual void close() = 0;                  // the agent ends; nothing is called afterwards
};

// Defined by the layer above, which is linked with this one. `agent` outlives the result.
std::unique_ptr<Interceptor> make_interceptor(Agent& agent);

}  // namespace muster::rpc
