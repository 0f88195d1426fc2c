// Calls by a given agent instead of the current World's: for threads that have no current World, such as those of
// libtorch's engine.
//
// Thread-safety: all functions. Errors: as call.h.
#pragma once

#include <chrono>
#include <optional>
#include <utility>

#include "muster/base/deadline.h"
#include "muster/rpc/call.h"
#include "rpc/agent/agent.h"
#include "rpc/objects/reference.h"

namespace muster::rpc::detail {

struct Callee {
  Callee(int worker) : worker(worker) {}
  Callee(int worker, std::chrono::milliseconds timeout, std::optional<Deadline> send_by = {})
      : worker(worker), timeout(timeout), send_by(send_by) {}
  int worker;
  std::optional<std::chrono::milliseconds> timeout;  // 0: none
  std::optional<Deadline> send_by;                   // as Agent::call()
};

template <auto F, typename... A>
Future<result_of<F>> call_on(Agent& agent, Callee callee, A&&... args) {
  StateRef<CallState<result_of<F>>> state(new CallState<result_of<F>>(agent.waits()));
  agent.call(callee.worker, {.function = &function_of<F>(), .timeout = callee.timeout},
             pack_for<arguments_of<F>>(std::forward<A>(args)...), *state, callee.send_by);
  return Future<result_of<F>>(state);
}

// The same for a function of an object.
struct CalleeObject {
  CalleeObject(const Reference& object, std::optional<std::chrono::milliseconds> timeout = {})
      : object(object), timeout(timeout) {}
  const Reference& object;
  std::optional<std::chrono::milliseconds> timeout;  // 0: none
};

template <auto F, typename... A>
Future<result_of<F>> call_on(Agent& agent, const CalleeObject& callee, A&&... args) {
  StateRef<CallState<result_of<F>>> state(new CallState<result_of<F>>(agent.waits()));
  agent.call(callee.object.owner,
             {.function = &function_of<F>(), .object = callee.object.object, .timeout = callee.timeout},
             pack_for<arguments_of<F>>(std::forward<A>(args)...), *state);
  return Future<result_of<F>>(state);
}

}  // namespace muster::rpc::detail
