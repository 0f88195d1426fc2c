#include "autograd/passes/call_node.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "autograd/passes/pass.h"
#include "autograd/passes/sub_graph.h"
#include "muster/autograd/again.h"
#include "muster/base/error.h"
#include "muster/rpc/call.h"
#include "rpc/api/call_on.h"
#include "rpc/objects/reference.h"

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

// The call that these tensors are results of; null if none requires grad.
CallNode* call_of(const std::vector<Tensor>& results) {
  for (const Tensor& one : results)
    if (one.defined() && one.requires_grad())
      if (auto* const node = dynamic_cast<PrefetchNode*>(one.grad_fn().get())) return &node->call();
  return nullptr;
}

}  // namespace

CallNode::CallNode(std::shared_ptr<rpc::detail::Reference> graph, std::shared_ptr<ContextState> context,
                   std::optional<std::chrono::milliseconds> timeout, edge_list slots)
    : Node(uint64_t{0}), graph_(std::move(graph)), context_(std::move(context)), timeout_(timeout) {
  slots.push_back(sink());
  set_next_edges(std::move(slots));
}

CallNode::Request::~Request() {
  if (!answer.valid() || asked_by != std::this_thread::get_id()) return;
  try {
    answer.wait();
  } catch (const std::exception&) {
    // RPC ends.
  }
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
    return {gradients, rpc::make_ready_future(std::vector<Tensor>(wanted.size()))};
  const auto agent = graph->agent.lock();
  if (!agent) throw Aborted("a remote call's backward: RPC has been shut down");
  const Context::Scope scope(context);
  variable_list sent = gradients;
  for (Tensor& one : sent) one = sendable(std::move(one));  // a hook between the nodes may have changed them
  return {gradients,
          rpc::detail::call_on<&SubGraph::backward>(*agent, rpc::detail::CalleeObject(*graph, timeout_), sent, wanted,
                                                    bool(run.accumulates), bool(run.keeps_graph)),
          graph->owner};
}

void CallNode::prefetch(const variable_list& gradients) {
  leave_nothing_if_this_run_fails();
  if (!pre_hooks().empty() || !tensor_pre_hooks().empty()) return;
  const auto request = std::make_shared<Request>(ask(gradients));
  replace_early(request->worker);
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
  for (bool answered = false; !answered;) {
    try {
      results = std::move(request->answer).get();
      answered = true;
    } catch (const RemoteError& error) {
      // If the callee's part of the graph is used up, report it as libtorch does for a local graph.
      TORCH_CHECK(error.remote_message().find(torch::autograd::ERR_BACKWARD_TWICE) == std::string::npos,
                  error.message());
      throw;
    } catch (const PeerLost& lost) {
      if (lost.rank() != request->worker || !replaced(request->worker)) throw;
      request = std::make_shared<Request>(ask(gradients));
    }
  }
  request->gradients.clear();  // the run may keep the request until its end
  if (results.size() + 1 != num_outputs())
    throw CorruptError("a remote call's backward gave another number of gradients");
  for (uint32_t i = 0; i < results.size(); ++i) results[i] = placed(std::move(results[i]), next_edge(i));
  give_each_its_own_storage(results);
  results.emplace_back();  // the sink's
  return results;
}

void CallNode::release_variables() {
  std::shared_ptr<rpc::detail::Reference> graph;  // these are destroyed without the lock
  Again again;
  rpc::Future<std::vector<Tensor>> replacement;
  const std::lock_guard lock(mutex_);
  graph.swap(graph_);
  again.swap(again_);
  std::swap(replacement, replacement_);
}

void CallNode::set_again(Again again) {
  const std::lock_guard lock(mutex_);
  again_.swap(again);
}

void CallNode::replace_early(int worker) {
  const std::lock_guard lock(mutex_);
  if (!graph_ || graph_->owner != worker || !again_ || replacement_.valid()) return;
  const auto agent = graph_->agent.lock();
  if (agent && !agent->is_alive(worker)) replacement_ = again_();
}

bool CallNode::replaced(int lost) {
  rpc::Future<std::vector<Tensor>> replacement;
  {
    const std::lock_guard lock(mutex_);
    if (!graph_ || graph_->owner != lost) return graph_ != nullptr;
    if (!again_) return false;
    if (!replacement_.valid()) replacement_ = again_();
    replacement = replacement_;
  }
  if (!replacement.valid()) return false;
  std::vector<Tensor> tensors;
  try {
    tensors = replacement.get();  // other runs over this graph may wait here too
  } catch (...) {
    const std::lock_guard lock(mutex_);
    replacement_ = {};
    throw;
  }
  const auto* const other = call_of(tensors);
  if (!other || other->next_edges() != next_edges())
    throw InvalidArgument(
        "a call was done again, because its worker was lost, and its result depends on other arguments than before",
        "A function whose calls are done again (.max_retries) must depend on nothing but its arguments.");
  std::shared_ptr<rpc::detail::Reference> before;
  const std::lock_guard lock(mutex_);
  if (!graph_ || graph_->owner != lost) return graph_ != nullptr;
  before = std::exchange(graph_, other->graph_);
  replacement_ = {};
  return true;
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

void call_again_if_lost(const std::vector<Tensor>& results, CallNode::Again again) {
  if (auto* const call = call_of(results)) call->set_again(std::move(again));
}

}  // namespace muster::autograd
