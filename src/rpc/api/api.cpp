// The functions of call.h, this_call.h and worker.h: each uses the agent of the current World.
#include "rpc/agent/agent.h"

#include <algorithm>
#include <utility>

#include "base/env.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/rpc/call.h"
#include "muster/rpc/this_call.h"
#include "muster/rpc/worker.h"

namespace muster::rpc {

std::shared_ptr<Agent> current_agent() {
  if (World* const world = World::current_or_null())
    if (auto agent = world->find<Agent>()) return agent;
  throw Aborted("RPC is not running in this thread's World", "Call muster::rpc::init() on every rank");
}

// --- this_call.h ---

ThisCall this_call() {
  ThisCall mine;
  mine.call_ = std::static_pointer_cast<IncomingCall>(detail::current_call());
  return mine;
}

const WorkerInfo& ThisCall::caller() const {
  static const WorkerInfo nobody{.name = "", .id = -1, .host = -1};
  return call_ ? call_->agent->workers()[static_cast<size_t>(call_->caller)] : nobody;
}
std::string ThisCall::function() const { return call_ ? call_->function->name : ""; }
bool ThisCall::cancelled() const {
  return call_ && (call_->cancelled.load(std::memory_order_acquire) || call_->deadline.passed());
}
void ThisCall::check() const {
  if (cancelled()) throw Aborted(text("nobody waits for the result of ", function(), " any more"));
}

// --- call.h ---

To::To(std::string_view name, CallOptions options) : rank_(current_agent()->find(name).id), options_(options) {}
To::To(int rank, CallOptions options) : rank_(current_agent()->find(rank).id), options_(options) {}

namespace detail {

Waits* waits() { return current_agent()->waits(); }
void start_call(int to, const CallSpec& spec, Payload payload, PendingCall& call) {
  current_agent()->call(to, spec, std::move(payload), call);
}

}  // namespace detail

// --- worker.h ---

std::chrono::milliseconds default_heartbeat() {
  return std::chrono::milliseconds(std::max<int64_t>(env_int("MUSTER_RPC_HEARTBEAT").value_or(2000), 1));
}

void init(const Options& options) {
  World& world = World::current();
  if (world.find<AttachedAgent>())
    throw InvalidArgument("RPC is already running in this World", "Call rpc::shutdown() first");
  for (const auto& [name, number] : {std::pair{"max_threads", options.max_threads}, {"max_calls", options.max_calls}})
    if (number < 1)
      throw InvalidArgument(text("rpc::Options::", name, ": expected 1 or more, got ", number), "Use 1 or more");
  if (options.timeout.count() < 0)
    throw InvalidArgument(text("rpc::Options::timeout: expected 0 ms or more, got ", options.timeout.count(), " ms"),
                          "Use 0 for none, or more");
  const auto agent = std::make_shared<Agent>(world, options);
  world.attach(agent);  // calls may come before start() returns
  world.attach(std::make_shared<AttachedAgent>(agent));
  try {
    agent->start(world);
  } catch (...) {
    world.detach<AttachedAgent>();
    world.detach<Agent>();
    throw;
  }
}

void shutdown(Shutdown how, std::chrono::milliseconds timeout) {
  World* const world = World::current_or_null();
  const auto attached = world ? world->find<AttachedAgent>() : nullptr;
  if (!attached) return;
  try {
    attached->agent->shut_down(how, timeout.count() == 0 ? Deadline::never() : Deadline::after(timeout));
  } catch (const InvalidArgument&) {
    throw;  // nothing has been done
  } catch (...) {
    world->detach<AttachedAgent>();
    world->detach<Agent>();
    throw;
  }
  world->detach<AttachedAgent>();
  world->detach<Agent>();
}

bool is_running() {
  World* const world = World::current_or_null();
  return world && world->find<Agent>();
}

const WorkerInfo& worker_info() { return current_agent()->self(); }
const WorkerInfo& worker_info(std::string_view name) { return current_agent()->find(name); }
const WorkerInfo& worker_info(int rank) { return current_agent()->find(rank); }
const std::vector<WorkerInfo>& all_workers() { return current_agent()->workers(); }
bool is_alive(int rank) { return current_agent()->is_alive(rank); }
Census census() { return current_agent()->census(); }
Traffic traffic() { return current_agent()->traffic(); }

}  // namespace muster::rpc
