// What the layer above adds to calls: autograd/ is behind it. An agent has one, and knows nothing more of it.
//
//   caller                                               callee
//   outgoing()  adds references, a note, a context  ──>  incoming()   before the arguments are unpacked
//                                                        the handler runs; it finds what incoming() gave back in
//                                                        IncomingCall::above
//   returned()  before the result is unpacked       <──  returning()  before the result is sent; not for errors, nor
//   for
//                                                        what is stored
//
// Each sees the tensors of the message (Payload::tensors), in the same order on both sides, and may replace them. The
// note (Payload::note) travels beside them; Header::context travels too, and is for this layer alone.
//
// For calls without tensors and outside of any context this costs a virtual call and a look at a thread-local.
//
// Thread-safety: all methods, at the same time. What they throw ends the call: outgoing() to whoever calls, incoming()
// and returning() as the call's error at the caller, returned() as its result.
#pragma once

#include <cstdint>
#include <memory>

#include "muster/rpc/payload.h"

namespace muster::rpc {

class Agent;
struct IncomingCall;

class Interceptor {
 public:
  virtual ~Interceptor() = default;

  // Gives back what returned() is to get; may be null.
  virtual std::shared_ptr<void> outgoing(int to, Payload& payload, uint64_t& context) = 0;
  virtual void returned(const std::shared_ptr<void>& sent, int from, uint64_t context, Payload& payload) = 0;

  virtual std::shared_ptr<void> incoming(const IncomingCall& call, Payload& payload) = 0;
  virtual void returning(const IncomingCall& call, Payload& payload, uint64_t& context) = 0;

  virtual void lost(int worker) = 0;  // nothing comes from it any more
  virtual void close() = 0;           // the agent ends; nothing is called afterwards
};

// Of the layer above, which is linked with this one. `agent` outlives it.
std::unique_ptr<Interceptor> make_interceptor(Agent& agent);

}  // namespace muster::rpc
