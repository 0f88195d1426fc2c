#include "autograd/passes/context.h"

#include <chrono>
#include <utility>

#include "autograd/passes/tape.h"
#include "muster/base/error.h"
#include "muster/rpc/this_call.h"
#include "muster/rpc/worker.h"
#include "rpc/api/call_on.h"

namespace muster::autograd {
namespace {

constexpr size_t kRemembered = 1024;  // contexts that have ended

}  // namespace

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

void Contexts::check(uint64_t id) const {
  const std::lock_guard lock(mutex_);
  if (!table_.contains(id)) throw Aborted("this autograd context has ended");
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

// Answers when all workers that this one has called in the context have dropped it too.
rpc::Task<void> end_context(uint64_t id) {
  const auto agent = rpc::current_agent();
  const auto told = end_on(*agent, id, tape_of(*agent).contexts().end(id));
  for (const auto& answer : told.answers) {
    try {
      co_await answer;
    } catch (const Error&) {
      // The worker is lost, or RPC ends there: then it drops the context by itself.
    }
  }
}

void keep_contexts(std::vector<uint64_t> living, uint64_t next) {
  tape_of(*rpc::current_agent()).contexts().keep_only(rpc::this_call().caller().id, living, next);
}

}  // namespace

Told end_on(rpc::Agent& agent, uint64_t id, const std::set<int>& workers, Deadline deadline) {
  const Context::Scope none(nullptr);
  Told told;
  for (const int worker : workers) {
    if (worker == agent.rank()) continue;
    try {
      // Without a timeout: the worker must be told, however busy it is.
      const rpc::detail::Callee callee(worker, std::chrono::milliseconds(0), deadline);
      told.answers.push_back(rpc::detail::call_on<&end_context>(agent, callee, uint64_t(id)));
    } catch (const TimeoutError&) {
      agent.tell_end(worker, id);
      told.all_answer = false;
    } catch (const PeerLost&) {
    } catch (const Aborted&) {
      // The worker is lost, or RPC ends: then it drops the context by itself.
    }
  }
  return told;
}

void tell_living_contexts(rpc::Agent& agent, int worker, const std::vector<uint64_t>& living, uint64_t next) {
  const Context::Scope none(nullptr);
  rpc::detail::call_on<&keep_contexts>(agent, worker, living, uint64_t(next));
}

}  // namespace muster::autograd
