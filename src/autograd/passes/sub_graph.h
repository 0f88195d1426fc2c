// The callee's part of a call's graph: from its results back to its arguments. It is an object of the callee's worker,
// and the caller's node (call_node.h) holds a reference to it. It is destroyed with that node or that node's worker, or
// when its context ends.
//
// Several of them may have nodes in common: two results of one value, a call that uses what an earlier one has left in
// an object, the gradients of a call and the call itself. One backward() of the caller may come to all of them, in any
// order. So the variables of a sub-graph that has nodes in common with another are not released as its nodes run, but
// afterwards, and only those of nodes that no other sub-graph has (NodeCounts).
//
// That node calls backward() as an ordinary remote call. If the caller records gradients of gradients, this call is
// recorded too: its results have a graph that leads to its own arguments (the gradients) and to those of the first
// call, and so on, to any order.
//
// Errors of backward(): those of libtorch's engine; c10::Error with libtorch's own text for a graph that has been used
// up; Aborted if the context has ended. Thread-safety: all methods; several backward() may run concurrently.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "autograd/graph/node.h"
#include "autograd/passes/receive_node.h"

namespace muster::autograd {

// How many of a worker's sub-graphs, of those that are not used up, have a node. A graph of inner steps has thousands
// of nodes, and is usually the only one: nothing is counted before any_is_shared() is asked about one of several.
// Thread-safety: all methods.
class NodeCounts {
 public:
  using Nodes = std::vector<Node*>;  // of a sub-graph, which has added them by this address
  void add(const Nodes& nodes);
  bool any_is_shared(const Nodes& nodes);
  // Returns those that no sub-graph has any more; none if any_is_shared() has not counted these nodes.
  std::vector<Node*> remove(const Nodes& nodes);

 private:
  std::mutex mutex_;
  size_t graphs_ = 0;
  ska::flat_hash_set<const Nodes*> uncounted_;
  ska::flat_hash_map<const Node*, uint32_t> counts_;  // of the other graphs
};

class SubGraph {
 public:
  // `nodes`: those of the graph that may keep variables.
  SubGraph(edge_list results, std::vector<PtrTo<ReceiveNode>> slots, std::vector<Node*> nodes,
           std::shared_ptr<NodeCounts> counts, std::shared_ptr<void> counted);
  SubGraph(const SubGraph&) = delete;
  SubGraph& operator=(const SubGraph&) = delete;
  ~SubGraph();

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
  std::unique_ptr<const NodeCounts::Nodes> nodes_;  // that this has added to counts_; kept by results_
  const std::shared_ptr<NodeCounts> counts_;
  const std::shared_ptr<void> counted_;
};

}  // namespace muster::autograd
