// The end of an agent: rounds until no worker has anything left to do (agent.h), and close().
#include "rpc/agent/agent.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::rpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

}  // namespace

// If no work of this worker is under way: how many calls it has made. This looks at the places in the order in which
// work goes from one to the next. Work that begins meanwhile makes a call, or comes in one.
std::optional<uint64_t> Agent::idle() const {
  const uint64_t made = made_.load(std::memory_order_seq_cst);
  {
    const std::lock_guard lock(pending_mutex_);
    if (!pending_.empty()) return std::nullopt;
  }
  if (active_.load(std::memory_order_seq_cst) != 0 || executor_->busy()) return std::nullopt;
  {
    const std::lock_guard lock(running_mutex_);
    for (const auto& one : peers_)
      if (!one->running.empty()) return std::nullopt;
  }
  if (executor_->busy() || made_.load(std::memory_order_seq_cst) != made) return std::nullopt;
  return made;
}

// To be called whenever this worker may have become idle. A server that waits in shutdown() for its callers is idle
// after each call, and goes on sleeping.
void Agent::changed() {
  if (idleness_watchers_.load(std::memory_order_seq_cst) != 0) bell_.ring();
}

std::optional<uint64_t> Agent::wait_until_idle(Deadline deadline) {
  std::optional<uint64_t> made;
  idleness_watchers_.fetch_add(1, std::memory_order_seq_cst);
  wait_for([&] { return (made = idle()).has_value(); }, deadline);
  idleness_watchers_.fetch_sub(1, std::memory_order_relaxed);
  return made;
}

// Waits for something that comes in messages. The thread that takes such a message rings the bell.
bool Agent::wait_for(const std::function<bool()>& done, Deadline deadline) {
  return executor_->wait(
      done, [&](nanoseconds limit) { bell_.sleep(limit, done); }, deadline);
}

void Agent::shut_down(Shutdown how, Deadline deadline) {
  if (forked()) return;
  if (in_handler())
    throw InvalidArgument("rpc::shutdown() was called from a handler", "Call it where init() was called");
  if (how == Shutdown::kAbrupt) return close();
  std::optional<uint64_t> before;
  std::vector<int> missing;
  std::set<int> lost;
  bool in_time = true;
  for (uint64_t round = 1;; ++round) {
    const auto mine = wait_until_idle(deadline);
    in_time = mine.has_value();
    if (!in_time) break;
    uint64_t sum = *mine;
    for (const auto& worker : workers_)
      if (worker.id != self_) send_quietly(worker.id, {.kind = MessageKind::kIdle, .call = sum, .token = round});
    const auto reported = [&](int rank) {
      const std::lock_guard lock(state_mutex_);
      return peer(rank).idle.contains(round);
    };
    const auto everybody = [&] {
      return std::all_of(workers_.begin(), workers_.end(), [&](const auto& worker) {
        return worker.id == self_ || reported(worker.id) || peer(worker.id).lost.load();
      });
    };
    in_time = wait_for(everybody, deadline);
    for (const auto& worker : workers_) {
      if (worker.id == self_) continue;
      if (reported(worker.id)) {
        const std::lock_guard lock(state_mutex_);
        sum += peer(worker.id).idle[round];
      } else if (peer(worker.id).lost.load()) {
        lost.insert(worker.id);
      } else {
        missing.push_back(worker.id);
      }
    }
    if (!in_time || before == sum) break;
    before = sum;
  }
  std::optional<PeerLost> error;
  // If a worker died in the last round, others may have ended because of it, and left. Blame the one that died.
  const auto blamed =
      std::find_if(lost.begin(), lost.end(), [&](int rank) { return !peer(rank).cause.ends_with(" left"); });
  if (!lost.empty()) error = lost_error(blamed == lost.end() ? *lost.begin() : *blamed);
  close(Deadline::after(std::clamp<nanoseconds>(deadline.left(), milliseconds(500), milliseconds(10'000))));
  if (error) throw *error;
  if (!in_time)
    throw TimeoutError(
        text("shutdown of RPC: ", missing.empty() ? std::string("calls of this worker have not ended")
                                                  : text("worker ", join(missing), " has not shut down")),
        missing, "Every worker must call rpc::shutdown()");
}

// This worker cannot end before its handlers do. They have been told to (this_call().cancelled()).
void Agent::say_what_runs() const {
  std::vector<std::string> calls;
  {
    const std::lock_guard lock(running_mutex_);
    for (const auto& one : peers_)
      for (const auto& [id, call] : one->running)
        calls.push_back(text(call->function ? call->function->name : "an unknown function", " for worker \"",
                             workers_[static_cast<size_t>(call->caller)].name, "\""));
  }
  constexpr size_t kMost = 3;
  const size_t more = calls.size() - std::min(calls.size(), kMost);
  calls.resize(calls.size() - more);
  MUSTER_LOG(kWarning) << "the end of RPC waits until handlers have ended"
                       << (calls.empty() ? "" : text(": ", join(calls, ", ")))
                       << (more == 0 ? "" : text(" and ", more, " more"))
                       << ". A handler that may run for long must look at rpc::this_call().cancelled()";
}

void Agent::close(Deadline flush) {
  if (forked()) return;  // everything here belongs to the parent process
  {
    const std::lock_guard lock(state_mutex_);
    if (std::exchange(closed_, true)) return;
  }
  std::unordered_map<uint64_t, Pending> pending;
  {
    const std::lock_guard lock(pending_mutex_);
    closing_.store(true);
    pending.swap(pending_);
  }
  const auto error = std::make_exception_ptr(Aborted("this worker's RPC has been shut down"));
  for (auto& [id, call] : pending) call.fail(error);
  pending.clear();
  for (auto& one : peers_) {
    const std::lock_guard lock(running_mutex_);
    for (auto& [id, call] : one->running) call->cancelled.store(true, std::memory_order_release);
    one->outstanding.store(0);
    one->room.ring();
  }
  bell_.ring();
  if (executor_) executor_->stop([this] { say_what_runs(); });
  if (far_) far_->close(flush);
  if (shm_) shm_->close(flush);
  // Handlers that are suspended for ever hold the agent, and the agent holds them: this breaks the cycle. What is
  // destroyed here may bring further handlers to their end.
  std::vector<std::map<uint64_t, std::shared_ptr<IncomingCall>>> suspended;
  {
    const std::lock_guard lock(running_mutex_);
    for (auto& one : peers_) suspended.push_back(std::move(one->running));
  }
  interceptor_->close();
  objects_.close();
}

}  // namespace muster::rpc
