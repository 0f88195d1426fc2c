// A backward pass over a few of libtorch's own nodes, without its engine.
//
// A call's sub-graph often is a handful of nodes on the CPU. To set up, queue and finish a run of the engine takes
// several times what these nodes take, and the caller waits for it
// (docs/decisions/0014-small-graphs-without-engine.md). The nodes are called here as the engine calls them, in its
// order (of sequence numbers, highest first), with the same checks of what they give, and sums in the order in which
// gradients come: the same bits. (Two threads may have given the same number; the engine's order is then that of a
// heap, this one that of the graph.)
//
// The engine stays for all that it is more than this for: hooks, anomaly mode, profilers, gradients of gradients, runs
// within another run, other devices, nodes of anything but libtorch's operators (they may ask for the engine's task),
// many nodes.
//
// Errors: what the nodes throw; c10::Error for a gradient that does not fit, with the engine's text.
// Thread-safety: as libtorch's nodes: several passes over the same nodes may run at the same time.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "autograd/node.h"

namespace muster::autograd {

class SmallGraph {
 public:
  static constexpr size_t kMostNodes = 32;

  // What can be reached from `roots`; none: the engine is wanted. `ends` says whether a node that is not libtorch's is
  // one at which run() may end.
  static std::optional<SmallGraph> of(const edge_list& roots, const std::function<bool(Node&)>& ends);

  const std::vector<Node*>& nodes() const { return nodes_; }  // in the order of reachable()

  // Once. `roots` as before. `take` is offered each node's gradients before it runs; where it gives true, that was all.
  // The gradients of roots are all defined.
  void run(const edge_list& roots, variable_list gradients, bool keep_graph,
           const std::function<bool(Node&, variable_list&)>& take);

 private:
  struct Step {
    int missing = 0;  // edges to it whose gradients have not come; -1: it has run
    variable_list inputs;
  };
  Step& step_of(const Node* node);
  void give(const Edge& edge, Tensor gradient);

  std::vector<Node*> nodes_;  // the roots hold them
  std::vector<Step> steps_;   // of each
};

}  // namespace muster::autograd
