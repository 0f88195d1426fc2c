// The callee's part of a call's graph: from its results back to its arguments. It is an object of the callee's worker,
// and the caller's node (call_node.h) holds a reference to it. It is destroyed with that node or that node's worker, or
// when its context ends.
//
// That node calls backward() as an ordinary remote call. If the caller records gradients of gradients, this call is
// recorded too: its results have a graph that leads to its own arguments (the gradients) and to those of the first
// call, and so on, to any order.
//
// Errors of backward(): those of libtorch's engine; c10::Error with libtorch's own text for a graph that has been used
// up; Aborted if the context has ended. Thread-safety: all methods; several backward() may run concurrently.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "autograd/node.h"
#include "autograd/receive_node.h"

namespace muster::autograd {

class SubGraph {
 public:
  SubGraph(edge_list results, std::vector<PtrTo<ReceiveNode>> slots, std::shared_ptr<void> counted)
      : results_(std::move(results)), slots_(std::move(slots)), counted_(std::move(counted)) {}

  // The arguments that the results depend on, of this call and of others.
  const std::vector<PtrTo<ReceiveNode>>& slots() const { return slots_; }

  // Takes gradients of the results (undefined ones count as zero); returns those of the slots that are `wanted`.
  std::vector<Tensor> backward(std::vector<Tensor> gradients, std::vector<uint8_t> wanted, bool accumulate,
                               bool keep_graph);
  void end();  // drops the graph, because its context has ended

 private:
  enum class State { kThere, kUsed, kEnded };
  std::mutex mutex_;
  State state_ = State::kThere;
  edge_list results_;
  std::vector<PtrTo<ReceiveNode>> slots_;
  std::shared_ptr<void> counted_;
};

}  // namespace muster::autograd
