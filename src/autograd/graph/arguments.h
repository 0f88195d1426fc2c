// The caller's record of a call's arguments: where their gradients go. It is an object of the caller's worker. The
// callee's nodes of the received tensors (receive_node.h) hold a reference to it, so it lives as long as a graph there
// may lead to them.
//
// Thread-safety: immutable.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "autograd/graph/node.h"
#include "rpc/agent/agent.h"

namespace muster::autograd {

struct Arguments {
  edge_list edges;  // of the tensors in the message that require grad, in order
  std::shared_ptr<void> counted;
};

// Finds Arguments of this agent by id; null if there is no such object. CorruptError if the object is something else.
std::shared_ptr<Arguments> find_arguments(rpc::Agent& agent, uint64_t object);

// A gradient that has come back to the caller.
struct Returned {
  uint64_t object = 0;
  uint32_t index = 0;
  Tensor gradient;
  MSGPACK_DEFINE(object, index, gradient);
};
// The handler at the caller: continues the backward pass from there.
void continue_backward(std::vector<Returned> gradients, bool keep_graph);

}  // namespace muster::autograd
