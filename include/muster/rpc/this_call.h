// What a handler may ask about the call that it serves.
//
//   at::Tensor step(at::Tensor state) {
//     while (!converged(state)) {
//       rpc::this_call().check();          // throws Aborted once nobody waits for the result any more
//       …
//
// Thread-safety: a value, valid in the handler's thread and, in a coroutine, after every co_await; copies may go to
// other threads.
#pragma once

#include <memory>
#include <string>

#include "muster/rpc/worker.h"

namespace muster::rpc {

struct IncomingCall;

class ThisCall {
 public:
  // Who calls; the default-constructed nobody ("", id -1) outside of a handler.
  const WorkerInfo& caller() const;
  std::string function() const;
  // Whether nobody waits for the result any more: the caller gave up (cancel(), its deadline passed) or died, or this
  // worker shuts down.
  bool cancelled() const;
  void check() const;  // Aborted if cancelled()

 private:
  friend ThisCall this_call();
  std::shared_ptr<IncomingCall> call_;
};

ThisCall this_call();

}  // namespace muster::rpc
