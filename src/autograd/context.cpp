#include "autograd/context.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>

#include "autograd/pass.h"
#include "autograd/tape.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/rpc/this_call.h"
#include "muster/rpc/worker.h"
#include "rpc/agent.h"
#include "rpc/call_on.h"

namespace muster::autograd {
namespace {

constexpr size_t kRemembered = 1024;  // contexts that have ended

// The context that a Context::Scope has made this thread's. It counts while the thread serves the call in which the
// scope was opened.
struct Opened {
  bool open = false;
  std::shared_ptr<ContextState> context;
  std::shared_ptr<void> call;
};
Opened& opened() {
  thread_local Opened mine;
  return mine;
}

}  // namespace

// --- the table ---

Contexts::Contexts(rpc::Agent& agent) : agent_(agent) {}

std::shared_ptr<ContextState> Contexts::begin() {
  const std::lock_guard lock(mutex_);
  auto state = std::make_shared<ContextState>(context_id(agent_.rank(), next_++), agent_);
  table_.emplace(state->id(), state);
  return state;
}

std::shared_ptr<ContextState> Contexts::find(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto it = table_.find(id);
  if (it != table_.end()) return it->second;
  const int creator = creator_of_context(id);
  const auto known = known_.find(creator);
  if (creator == agent_.rank() || ended_.contains(id) || (known != known_.end() && known->second.has_ended(id)))
    throw Aborted("this autograd context has ended");
  return table_.emplace(id, std::make_shared<ContextState>(id, agent_)).first->second;
}

void Contexts::remember(uint64_t id) {
  if (!ended_.insert(id).second) return;
  ended_order_.push_back(id);
  if (ended_order_.size() <= kRemembered) return;
  ended_.erase(ended_order_.front());
  ended_order_.pop_front();
}

std::set<int> Contexts::end(uint64_t id) {
  std::shared_ptr<ContextState> state;
  {
    const std::lock_guard lock(mutex_);
    remember(id);
    if (auto node = table_.extract(id)) state = std::move(node.mapped());
  }
  return state ? state->end() : std::set<int>();
}

std::pair<std::vector<uint64_t>, uint64_t> Contexts::lost(int worker, const std::set<int>& others) {
  keep_only(worker, {}, UINT64_MAX);
  const std::lock_guard lock(mutex_);
  std::vector<uint64_t> living;
  for (const auto& [id, state] : table_) {
    if (creator_of_context(id) != agent_.rank()) continue;
    living.push_back(id);
    state->also_tell(others);
  }
  return {living, next_ == 1 ? 1 : context_id(agent_.rank(), next_)};
}

void Contexts::keep_only(int creator, const std::vector<uint64_t>& living, uint64_t next) {
  std::vector<uint64_t> gone;
  {
    const std::lock_guard lock(mutex_);
    Known& known = known_[creator];
    if (next < known.next) return;  // outdated: these handlers run in any order
    std::set<uint64_t> still(living.begin(), living.end());
    if (next == known.next) std::erase_if(still, [&](uint64_t id) { return known.has_ended(id); });
    known = {.living = std::move(still), .next = next};
    for (const auto& [id, state] : table_)
      if (creator_of_context(id) == creator && known.has_ended(id)) gone.push_back(id);
  }
  for (const uint64_t id : gone) end(id);
}

void Contexts::close() {
  decltype(table_) table;
  {
    const std::lock_guard lock(mutex_);
    table.swap(table_);
  }
  for (const auto& [id, state] : table) state->end();
}

size_t Contexts::size() const {
  const std::lock_guard lock(mutex_);
  return table_.size();
}

// --- between workers ---

namespace {

// The calls that end a context are made outside of any context.
std::vector<rpc::Future<void>> tell_end(rpc::Agent& agent, uint64_t id, const std::set<int>& workers);

// Answers when all workers that this one has called in the context have dropped it too.
rpc::Task<void> end_context(uint64_t id) {
  const auto agent = rpc::current_agent();
  const auto told = tell_end(*agent, id, tape_of(*agent).contexts().end(id));
  for (const auto& answer : told) {
    try {
      co_await answer;
    } catch (const Error&) {
      // The worker is lost, or RPC ends there: then it drops the context by itself.
    }
  }
}

std::vector<rpc::Future<void>> tell_end(rpc::Agent& agent, uint64_t id, const std::set<int>& workers) {
  const Context::Scope none(nullptr);
  std::vector<rpc::Future<void>> told;
  for (const int worker : workers) {
    if (worker == agent.rank()) continue;
    try {
      // Without a timeout: the worker must be told, however busy it is.
      told.push_back(rpc::detail::call_on<&end_context>(agent, {worker, std::chrono::milliseconds(0)}, uint64_t(id)));
    } catch (const PeerLost&) {
    } catch (const Aborted&) {
      // The worker is lost, or RPC ends: then it drops the context by itself.
    }
  }
  return told;
}

void keep_contexts(std::vector<uint64_t> living, uint64_t next) {
  tape_of(*rpc::current_agent()).contexts().keep_only(rpc::this_call().caller().id, living, next);
}

}  // namespace

void tell_living_contexts(rpc::Agent& agent, int worker, const std::vector<uint64_t>& living, uint64_t next) {
  const Context::Scope none(nullptr);
  rpc::detail::call_on<&keep_contexts>(agent, worker, living, uint64_t(next));
}

// --- the public side ---

std::shared_ptr<ContextState> current_context() {
  const auto& call = rpc::detail::current_call();
  if (const Opened& mine = opened(); mine.open && mine.call == call) return mine.context;
  const auto received = current_received();
  return received ? received->context : nullptr;
}

Context::Scope::Scope(std::shared_ptr<ContextState> context)
    : open_before_(std::exchange(opened().open, true)),
      context_before_(std::exchange(opened().context, std::move(context))),
      call_before_(std::exchange(opened().call, rpc::detail::current_call())) {}

Context::Scope::~Scope() {
  opened().open = open_before_;
  opened().context = std::move(context_before_);
  opened().call = std::move(call_before_);
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
  const auto workers = tape_of(*agent).contexts().end(state_->id());
  for (const auto& answer : tell_end(*agent, state_->id(), workers)) {
    if (!answer.wait_for(deadline.left()))
      throw TimeoutError("an autograd context was ended, and not all workers that it had called have answered");
  }
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
    throw InvalidArgument(text("backward of ", roots.size(), " roots with ", gradients.size(), " gradients"));
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
      throw InvalidArgument(text("root ", i, " has ", roots[i].numel(), " elements, and no gradient"),
                            "Take its sum, or pass a gradient");
    gradients[i] = at::ones_like(roots[i]);
  }
  Pass pass{.leaves = Leaves::kContext,
            .context = state,
            .path = tape_of(*rpc::current_agent()).path_in(*state),
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
