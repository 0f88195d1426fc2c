#include "autograd/call_node.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "autograd/pass.h"
#include "autograd/sub_graph.h"
#include "muster/base/error.h"
#include "muster/rpc/call.h"
#include "muster/rpc/remote_error.h"
#include "rpc/call_on.h"
#include "rpc/reference.h"

namespace muster::autograd {
namespace {

bool same(const variable_list& a, const variable_list& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& x, const Tensor& y) { return x.is_same(y); });
}

// Gradients that were one tensor at the callee, or parts of one, arrive as several tensors on one storage, each with
// one use. AccumulateGrad would take each as .grad, and two .grads would share memory; so each gets its own storage.
// Differentiable.
void give_each_its_own_storage(variable_list& gradients) {
  std::unordered_set<const c10::StorageImpl*> seen;
  for (Tensor& one : gradients)
    if (one.defined() && one.has_storage() && !seen.insert(one.storage().unsafeGetStorageImpl()).second)
      one = one.clone();
}

}  // namespace

CallNode::CallNode(std::shared_ptr<rpc::detail::Reference> graph, std::shared_ptr<ContextState> context,
                   std::optional<std::chrono::milliseconds> timeout, edge_list slots)
    : Node(uint64_t{0}), graph_(std::move(graph)), context_(std::move(context)), timeout_(timeout) {
  slots.push_back(sink());
  set_next_edges(std::move(slots));
}

CallNode::Request CallNode::ask(const variable_list& gradients) {
  std::shared_ptr<rpc::detail::Reference> graph;
  {
    const std::lock_guard lock(mutex_);
    graph = graph_;
  }
  TORCH_CHECK(graph, torch::autograd::ERR_BACKWARD_TWICE);
  const Run run = current_run();
  const auto context = run.context ? run.context : context_;
  if (context_) context_->check();
  if (context) context->check();
  std::vector<uint8_t> wanted;
  for (uint32_t i = 0; i + 1 < num_outputs(); ++i) wanted.push_back(task_should_compute_output(i));
  const bool nothing =
      std::none_of(gradients.begin(), gradients.end(), [](const Tensor& one) { return one.defined(); });
  if (nothing || (!run.accumulates && std::none_of(wanted.begin(), wanted.end(), [](uint8_t one) { return one != 0; })))
    return {.gradients = gradients, .answer = rpc::make_ready_future(std::vector<Tensor>(wanted.size()))};
  const auto agent = graph->agent.lock();
  if (!agent) throw Aborted("a remote call's backward: RPC has been shut down");
  const Context::Scope scope(context);
  variable_list sent = gradients;
  for (Tensor& one : sent) one = sendable(std::move(one));  // a hook between the nodes may have changed them
  return {.gradients = gradients,
          .answer = rpc::detail::call_on<&SubGraph::backward>(*agent, rpc::detail::CalleeObject(*graph, timeout_), sent,
                                                              wanted, bool(run.accumulates), bool(run.keeps_graph))};
}

void CallNode::prefetch(const variable_list& gradients) {
  leave_nothing_if_this_run_fails();
  if (!pre_hooks().empty() || !tensor_pre_hooks().empty()) return;
  const auto request = std::make_shared<Request>(ask(gradients));
  torch::autograd::Engine::get_default_engine().queue_callback([request] { (void)request; });
  const std::lock_guard lock(mutex_);
  std::erase_if(requests_, [](const auto& entry) { return entry.second.expired(); });
  requests_[torch::autograd::get_current_graph_task_id()] = request;
}

variable_list CallNode::apply(variable_list&& gradients) {
  leave_nothing_if_this_run_fails();
  std::shared_ptr<Request> request;
  {
    const std::lock_guard lock(mutex_);
    if (auto found = requests_.extract(torch::autograd::get_current_graph_task_id())) request = found.mapped().lock();
  }
  if (!request) request = std::make_shared<Request>(ask(gradients));
  TORCH_INTERNAL_ASSERT(same(request->gradients, gradients),
                        "gradients changed between the two nodes of a remote call");
  variable_list results;
  try {
    results = std::move(request->answer).get();
  } catch (const rpc::RemoteError& error) {
    // If the callee's part of the graph is used up, report it as libtorch does for a local graph.
    TORCH_CHECK(error.remote_message().find(torch::autograd::ERR_BACKWARD_TWICE) == std::string::npos, error.message());
    throw;
  }
  if (results.size() + 1 != num_outputs()) throw Corrupt("a remote call's backward gave another number of gradients");
  for (uint32_t i = 0; i < results.size(); ++i) results[i] = placed(std::move(results[i]), next_edge(i));
  give_each_its_own_storage(results);
  results.emplace_back();  // the sink's
  return results;
}

void CallNode::release_variables() {
  std::shared_ptr<rpc::detail::Reference> graph;
  const std::lock_guard lock(mutex_);
  graph.swap(graph_);
}

PrefetchNode::PrefetchNode(PtrTo<CallNode> call, uint32_t results) : Node(UINT64_MAX), call_(*call) {
  edge_list edges;
  for (uint32_t i = 0; i < results; ++i) edges.emplace_back(call, i);
  set_next_edges(std::move(edges));
}

variable_list PrefetchNode::apply(variable_list&& gradients) {
  for (Tensor& one : gradients) one = sendable(std::move(one));
  if (post_hooks().empty()) call_.prefetch(gradients);
  return std::move(gradients);
}

}  // namespace muster::autograd
