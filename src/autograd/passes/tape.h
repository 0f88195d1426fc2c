// What this layer adds to every remote call (rpc/kit/interceptor.h), and what it keeps for an agent.
//
// A call with tensors that require grad, made in grad mode:
//
//   caller                                                    callee
//   keeps Arguments: the edges of these tensors; sends
//   a reference to them along                           ──>   the tensors come from ReceiveNodes, which hold the
//                                                             reference
//                                                             the function runs
//   the results come from PrefetchNode and CallNode,    <──   if results require grad: keeps a SubGraph, sends a
//   which holds the reference; its edges go to the            reference to it, and the list of arguments that they
//   arguments that the results depend on                      depend on
//
// An argument in that list belongs to the caller (it is of this call, or of an earlier one whose result stayed at the
// callee: rpc::remote, or in an object), or to another worker: then the caller has a ReceiveNode for it too.
//
// On the wire: Header::context has the context's id, kRecorded and kOrdered; the note of a call has its path, if it has
// one, and that of a result the list (tape.cpp). Both are checked as they are read: CorruptError.
//
// A call has a path if it is made in a context, if its program wants deterministic algorithms (ordered_sums.h), or if
// it is made by the handler of a call that has one.
//
// Thread-safety: all methods.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "autograd/graph/arguments.h"
#include "autograd/graph/ordered_sums.h"
#include "autograd/graph/path.h"
#include "autograd/passes/context.h"
#include "autograd/passes/receive_node.h"
#include "autograd/passes/sub_graph.h"
#include "rpc/agent/agent.h"
#include "rpc/kit/interceptor.h"

namespace muster::autograd {

// What IncomingCall::above holds: the context of a call, and the call's place among others.
struct Received {
  std::shared_ptr<ContextState> context;  // null: none
  Path path;                              // empty: none
  std::atomic<uint32_t> calls{0};         // that its handler has made and that have a path
};
std::shared_ptr<Received> current_received();  // of the call that this thread serves; may be null

class Tape final : public rpc::Interceptor {
 public:
  explicit Tape(rpc::Agent& agent);

  std::shared_ptr<void> outgoing(int to, Timeout timeout, rpc::Payload& payload, uint64_t& context) override;
  void about_to_send(uint64_t context) override;
  void returned(const std::shared_ptr<void>& sent, int from, uint64_t context, rpc::Payload& payload) override;
  std::shared_ptr<void> incoming(const rpc::IncomingCall& call, rpc::Payload& payload) override;
  void returning(const rpc::IncomingCall& call, rpc::Payload& payload, uint64_t& context) override;
  void ended(uint64_t context) override;
  void lost(int worker) override;
  void close() override { contexts_.close(); }

  Contexts& contexts() { return contexts_; }
  OrderedSums& sums() { return sums_; }
  // The path of the next call that this thread makes in the context; null: in none.
  Path next_path(ContextState* context);
  Census census() const;

 private:
  using Count = std::shared_ptr<std::atomic<size_t>>;
  static std::shared_ptr<void> counted(const Count& count);

  rpc::Agent& agent_;
  Contexts contexts_;
  OrderedSums sums_;
  std::atomic<uint32_t> calls_{0};  // of this worker, outside of handlers and contexts, that have a path
  ReceiveNodes receive_nodes_;
  const std::shared_ptr<NodeCounts> nodes_ = std::make_shared<NodeCounts>();
  const Count sub_graphs_ = std::make_shared<std::atomic<size_t>>(0);
  const Count arguments_ = std::make_shared<std::atomic<size_t>>(0);
};

Tape& tape_of(rpc::Agent& agent);

}  // namespace muster::autograd
