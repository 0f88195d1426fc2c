// A remote call on the caller's tape: two nodes.
//
//   result ── PrefetchNode ── CallNode ── the arguments' edges
//
// The prefetch node hands gradients through and, on the way, sends the request for backward to the callee, without
// waiting. It has the highest sequence number, so the engine runs it as soon as its gradients are there. The call node
// waits for the answer; it has the lowest, so the engine does everything else first. Independent calls thus run
// backward at the same time, beside what this worker has to do itself. (Where hooks of the two nodes may
// change gradients between them, the call node sends the request.)
//
// The prefetch node is on the devices of the results, and hands gradients on by the CPU. So the call node runs on the
// thread that called the engine, and no thread that serves a device waits for another worker, who may need it.
//
// Thread-safety: as libtorch's nodes: several engines may run them at the same time.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "autograd/context.h"
#include "autograd/node.h"
#include "muster/rpc/future.h"
#include "rpc/agent.h"

namespace muster::autograd {

class CallNode final : public Node {
 public:
  // `slots`: where the gradients that the callee answers go, in its order.
  CallNode(std::shared_ptr<rpc::detail::Reference> graph, std::shared_ptr<ContextState> context, edge_list slots);

  void prefetch(const variable_list& gradients);
  variable_list apply(variable_list&& gradients) override;
  void release_variables() override;
  std::string name() const override { return "MusterRemoteCall"; }

 private:
  struct Request {  // belongs to the engine's task: it goes with that, also where the call node never runs
    variable_list gradients;
    rpc::Future<std::vector<Tensor>> answer;
  };
  Request ask(const variable_list& gradients);

  std::mutex mutex_;
  std::shared_ptr<rpc::detail::Reference> graph_;   // null: used up
  const std::shared_ptr<ContextState> context_;     // in which the call was made; null: in none
  std::map<int, std::weak_ptr<Request>> requests_;  // by the engine's task
};

class PrefetchNode final : public Node {
 public:
  explicit PrefetchNode(PtrTo<CallNode> call, uint32_t results);
  variable_list apply(variable_list&& gradients) override;
  std::string name() const override { return "MusterPrefetch"; }

 private:
  CallNode& call_;  // next_edges() hold it
};

}  // namespace muster::autograd
