// A backward pass over a few of libtorch's own nodes, without its engine.
//
// A call's sub-graph is often a handful of nodes on the CPU. To set up, queue and finish a run of the engine takes
// several times as long as these nodes, and the caller waits for it
// (docs/decisions/0014-small-graphs-without-engine.md). The nodes are called here as the engine calls them: in its
// order (by sequence number, highest first), with the same checks of their outputs, and with sums in the order in which
// gradients come. So the results have the same bits. (What is recorded of the gradients of linear layers, to be
// differentiated again, has fewer nodes than the engine's: linear_gradient.h.) (Two threads may have given the same
// number; the engine's order is then that of a heap, this one that of the graph.)
//
// The engine is still used for everything else: hooks, anomaly mode, profilers, runs within another run, other devices,
// nodes of anything but libtorch's operators (they may ask for the engine's task), and many nodes.
//
// Errors: what the nodes throw; c10::Error for a gradient that does not fit, with the engine's text.
// Thread-safety: as libtorch's nodes: several passes over the same nodes may run concurrently.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "autograd/graph/node.h"

namespace muster::autograd {

class SmallGraph {
 public:
  static constexpr size_t kMostNodes = 32;

  // The graph that can be reached from `roots`; none if it needs the engine. `ends` says whether run() may end at a
  // node that is not libtorch's. The graph beyond `stops` does not belong to it.
  static std::optional<SmallGraph> of(const edge_list& roots, const std::function<bool(Node&)>& ends,
                                      const std::vector<const Node*>& stops = {});

  // Whether each node has a way to one of these: the engine would run no other, and accumulate into no other leaf.
  bool all_lead_to(const std::vector<const Node*>& ends) const;

  const std::vector<Node*>& nodes() const { return nodes_; }  // in the order of reachable()

  // May be called once, with the same `roots`. `take` is offered each node's gradients before the node runs; if it
  // returns true, the node does not run. The gradients of the roots must all be defined. `create_graph`: autograd
  // records what the nodes do.
  void run(const edge_list& roots, variable_list gradients, bool keep_graph,
           const std::function<bool(Node&, variable_list&)>& take, bool create_graph = false);

 private:
  struct Step {
    int missing = 0;  // edges to it whose gradients have not come; -1: it has run
    variable_list inputs;
  };
  Step& step_of(const Node* node);
  void run_linear(Node& node, const Tensor& of_result);  // linear_gradient.h
  void give(const Edge& edge, Tensor gradient);
  bool stops_at(const Node* node) const;

  std::vector<Node*> nodes_;  // kept alive by the roots
  std::vector<Step> steps_;   // one for each node
  std::vector<const Node*> stops_;
};

// torch::autograd::grad({root}, inputs) with create_graph and allow_unused, without the engine. None if that is not
// possible: see above; if one input is a function of another, or has so large a graph that it may be; and if a node
// leads to none of the inputs. The root has one element.
std::optional<variable_list> small_grad(const Tensor& root, const variable_list& inputs);

}  // namespace muster::autograd
