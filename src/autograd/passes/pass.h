// One run of libtorch's engine that this layer has started, and what the nodes of this layer need to know about it
// while they run. A run that a user starts, such as loss.backward(), has no Pass: its nodes ask the engine itself.
//
// The engine is given a seed node as its root. When the seed node runs, it notes which of the engine's tasks belongs to
// this pass. Other nodes find the pass by the task that they run in, on any thread.
//
// Where leaves get their gradients:
//   kAccumulate   in .grad, by libtorch's own nodes with all their hooks, as backward() does
//   kOrdered      in .grad, too, in the order of the paths (ordered_sums.h)
//   kContext      in the context's map (context_state.h); no .grad is touched
//   kNone         nowhere, as grad() does. The engine goes only where an argument is wanted
//
// When a run fails, ours or the user's, libtorch leaves what it has not run in the thread's queue, until the thread's
// next run reaches it. The queue holds graphs, and these hold objects of other workers. So every node of this layer
// that runs makes sure that the rest is destroyed with the run: leave_nothing_if_this_run_fails(). (This cannot help a
// user's run that fails before any of our nodes has run: docs/autograd.md.)
//
// Thread-safety: current_pass() and the members of a Pass under its mutex from any thread of the engine; run() is a
// function of its arguments.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "autograd/graph/node.h"
#include "autograd/graph/path.h"

namespace muster::autograd {

class ContextState;
class OrderedSums;
class ReceiveNode;

enum class Leaves { kAccumulate, kOrdered, kContext, kNone };

struct Pass {
  Leaves leaves = Leaves::kAccumulate;
  std::shared_ptr<ContextState> context;  // of calls that are made; with kContext, also where gradients go
  OrderedSums* sums = nullptr;            // with kOrdered: the worker's own
  Path path;                              // with kOrdered and kContext: the gradients' place in the order of sums
  const std::vector<PtrTo<ReceiveNode>>* slots = nullptr;  // the nodes whose gradients the pass returns
  bool keep_graph = false;
  bool create_graph = false;

  std::unordered_set<const ReceiveNode*> collects;  // run() fills it from the slots
  std::mutex mutex;
  std::map<const ReceiveNode*, Tensor> collected;
};

Pass* current_pass();  // of the engine's task that this thread runs; null if we did not start it

// Runs the engine from `roots`, with these gradients. Returns the gradients of pass.slots; undefined if there is none,
// or if `wanted` is given and 0 for the slot.
variable_list run(Pass& pass, const edge_list& roots, const variable_list& gradients,
                  const std::vector<uint8_t>* wanted = nullptr);

// For the engine's task that this thread runs: if it fails, what is left of it in the queue is destroyed before the
// error reaches the code that began the run.
void leave_nothing_if_this_run_fails();

// For a run in a handler: if its call was made in a context, the run is in that context, at the call's place in the
// order of sums. If it was not, and this program wants deterministic algorithms, .grad is summed in that order.
void enter_context_of_call(Pass& pass);

// What the nodes of calls need to know about the run that they are part of.
struct Run {
  bool accumulates;  // leaves get their gradients, here and on other workers
  bool keeps_graph;
  std::shared_ptr<ContextState> context;  // of the pass; null: none
  int task;
};
Run current_run();

}  // namespace muster::autograd
