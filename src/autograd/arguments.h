// The caller's end of the arguments of a call: where their gradients go. An object of the caller's worker; the callee's
// nodes of the received tensors (receive_node.h) hold a reference to it, so it lives as long as a graph there may lead
// to them.
//
// Thread-safety: immutable.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "autograd/node.h"
#include "rpc/agent.h"

namespace muster::autograd {

struct Arguments {
  edge_list edges;  // of the tensors in the message that ask for gradients, in order
  std::shared_ptr<void> counted;
};

// The agent's own, by id; null: there is no such object. Corrupt where it is another one.
std::shared_ptr<Arguments> find_arguments(rpc::Agent& agent, uint64_t object);

// A gradient that has come back to the caller.
struct Returned {
  uint64_t object = 0;
  uint32_t index = 0;
  Tensor gradient;
  MSGPACK_DEFINE(object, index, gradient);
};
// The handler: goes on with backward from there.
void continue_backward(std::vector<Returned> gradients, bool keep_graph);

}  // namespace muster::autograd
