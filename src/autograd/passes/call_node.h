// A remote call on the caller's tape: two nodes.
//
//   result ── PrefetchNode ── CallNode ── the arguments' edges
//
// The prefetch node passes gradients through and, on the way, sends the request for backward to the callee, without
// waiting. It has the highest sequence number, so the engine runs it as soon as its gradients are there. The call node
// waits for the answer; it has the lowest sequence number, so the engine does everything else first. So calls whose
// gradients are known run backward concurrently, and so does this worker's own part. (If hooks of the two nodes may
// change gradients between them, the call node sends the request.)
//
// The prefetch node is on the devices of the results, and passes gradients on over the CPU. So the call node runs on
// the thread that called the engine, and no thread that serves a device waits for another worker, which may need it.
//
// A call that may be done again (again.h) and whose worker is lost takes the graph of the call that replaces it. The
// prefetch node begins with that, so that several calls of a lost worker are done again concurrently.
//
// Thread-safety: as libtorch's nodes: several engines may run them concurrently.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "autograd/graph/node.h"
#include "autograd/passes/context.h"
#include "muster/rpc/future.h"
#include "rpc/agent/agent.h"

namespace muster::autograd {

class CallNode final : public Node {
 public:
  // `timeout`: of the call, and so of its backward; the worker's if there is none. `slots`: where the gradients in the
  // callee's answer go, in the same order.
  CallNode(std::shared_ptr<rpc::detail::Reference> graph, std::shared_ptr<ContextState> context,
           std::optional<std::chrono::milliseconds> timeout, edge_list slots);

  void prefetch(const variable_list& gradients);
  variable_list apply(variable_list&& gradients) override;
  void release_variables() override;
  std::string name() const override { return "MusterRemoteCall"; }

  using Again = std::function<rpc::Future<std::vector<Tensor>>()>;
  void set_again(Again again);

 private:
  // Belongs to the engine's task and is destroyed with it, even if the call node never runs. If the task has failed
  // before the answer was there, waits for it: what goes on after the error would add to the user's next gradients.
  struct Request {
    variable_list gradients;
    rpc::Future<std::vector<Tensor>> answer;
    int worker = -1;                                        // that was asked; none if there is nothing to compute
    std::thread::id asked_by = std::this_thread::get_id();  // the destructor waits only there, not in another device's

    Request(variable_list its_gradients, rpc::Future<std::vector<Tensor>> its_answer, int whom = -1)
        : gradients(std::move(its_gradients)), answer(std::move(its_answer)), worker(whom) {}
    Request(Request&&) = default;
    Request& operator=(Request&&) = delete;
    ~Request();
  };
  Request ask(const variable_list& gradients);
  // Begins to do the call again, if its graph is on that worker, which is lost.
  void replace_early(int worker);
  // Does the call again, and takes the result's graph. False: it cannot; true: the graph is no longer on that worker.
  bool replaced(int lost);

  std::mutex mutex_;
  std::shared_ptr<rpc::detail::Reference> graph_;  // null: used up
  Again again_;                                    // null: the call is not done again
  rpc::Future<std::vector<Tensor>> replacement_;   // under way
  const std::shared_ptr<ContextState> context_;    // in which the call was made; may be null
  const std::optional<std::chrono::milliseconds> timeout_;
  std::map<int, std::weak_ptr<Request>> requests_;  // by the engine's task
};

class PrefetchNode final : public Node {
 public:
  explicit PrefetchNode(PtrTo<CallNode> call, uint32_t results);
  variable_list apply(variable_list&& gradients) override;
  std::string name() const override { return "MusterPrefetch"; }
  CallNode& call() const { return call_; }

 private:
  CallNode& call_;  // next_edges() hold it
};

}  // namespace muster::autograd
