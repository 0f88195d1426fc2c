#include "autograd/passes/context.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <iterator>

#include "autograd/passes/pass.h"
#include "autograd/passes/tape.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/rpc/this_call.h"
#include "muster/rpc/worker.h"
#include "rpc/agent/agent.h"

namespace muster::autograd {
namespace {

// The contexts that Context::Scope has made this thread's, the latest last. One counts while the thread serves the call
// in which its scope was opened.
struct Opened {
  const Context::Scope* scope;
  std::shared_ptr<ContextState> context;
  std::shared_ptr<void> call;
};
std::vector<Opened>& opened() {
  thread_local std::vector<Opened> mine;
  return mine;
}

}  // namespace

std::shared_ptr<ContextState> current_context() {
  const auto& call = rpc::detail::current_call();
  if (const auto& mine = opened(); !mine.empty() && mine.back().call == call) return mine.back().context;
  const auto received = current_received();
  return received ? received->context : nullptr;
}

Context::Scope::Scope(std::shared_ptr<ContextState> context) {
  opened().push_back({this, std::move(context), rpc::detail::current_call()});
}

Context::Scope::~Scope() {
  auto& all = opened();
  const auto mine = std::find_if(all.rbegin(), all.rend(), [this](const Opened& one) { return one.scope == this; });
  if (mine == all.rend()) return;         // against the rules: another thread's
  const Opened ended = std::move(*mine);  // destroyed when the list is in order
  all.erase(std::next(mine).base());
}

Context::Context() : state_(tape_of(*rpc::current_agent()).contexts().begin()) { scope_.emplace(state_); }

Context::~Context() {
  try {
    if (const auto agent = state_->agent()) tape_of(*agent).ended(state_->id());
  } catch (const std::exception&) {
    // RPC ends: there is no worker to tell.
  }
  state_->end();
}

uint64_t Context::id() const { return state_->id(); }
std::vector<Gradient> Context::gradients() const { return state_->gradients(); }
Tensor Context::gradient(const Tensor& parameter) const { return state_->gradient(parameter); }

void Context::end(std::chrono::milliseconds timeout) {
  scope_.reset();
  const auto agent = state_->agent();
  if (!agent) return;
  const auto deadline = Deadline::after(timeout);
  const Told told = end_on(*agent, state_->id(), tape_of(*agent).contexts().end(state_->id()), deadline);
  const bool all_answered = std::all_of(told.answers.begin(), told.answers.end(), [&](const rpc::Future<void>& answer) {
    return answer.wait_for(deadline.left());
  });
  if (!told.all_answer || !all_answered)
    throw TimeoutError("an autograd context was ended, and not all workers that it had called have answered");
}

namespace {
std::shared_ptr<ContextState> require_context() {
  auto context = current_context();
  if (!context) throw InvalidArgument("there is no autograd context here", "Make an autograd::Context before the call");
  return context;
}
}  // namespace

std::vector<Gradient> gradients() { return require_context()->gradients(); }
Tensor gradient(const Tensor& parameter) { return require_context()->gradient(parameter); }

void backward(const Context& context, const std::vector<Tensor>& roots, std::vector<Tensor> gradients,
              std::optional<bool> retain_graph, bool create_graph) {
  const auto& state = context.state();
  state->check();
  if (!gradients.empty() && gradients.size() != roots.size())
    throw InvalidArgument(
        text("backward(): expected ", roots.size(), " gradients, one for each root, got ", gradients.size()));
  gradients.resize(roots.size());
  edge_list edges;
  for (size_t i = 0; i < roots.size(); ++i) {
    TORCH_CHECK(roots[i].requires_grad(), "element ", i, " of the roots does not require grad and has no grad_fn");
    edges.push_back(torch::autograd::impl::gradient_edge(roots[i]));
    if (gradients[i].defined()) {
      // A copy, because the context may keep it while the caller reuses its memory.
      const at::AutoGradMode record(create_graph);
      gradients[i] = gradients[i].clone();
      continue;
    }
    if (roots[i].numel() != 1)
      throw InvalidArgument(
          text("root ", i, ": expected one element, because it has no gradient, got ", roots[i].numel()),
          "Take its sum, or pass a gradient");
    gradients[i] = at::ones_like(roots[i]);
  }
  Pass pass{.leaves = Leaves::kContext,
            .context = state,
            .path = tape_of(*rpc::current_agent()).next_path(state.get()),
            .keep_graph = retain_graph.value_or(create_graph),
            .create_graph = create_graph};
  run(pass, edges, gradients);
}

std::vector<Tensor> grad(const Context& context, const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                         const std::vector<Tensor>& grad_outputs, std::optional<bool> retain_graph, bool create_graph,
                         bool allow_unused) {
  context.state()->check();
  return torch::autograd::grad(outputs, inputs, grad_outputs, retain_graph, create_graph, allow_unused);
}

Census census() { return tape_of(*rpc::current_agent()).census(); }

}  // namespace muster::autograd
