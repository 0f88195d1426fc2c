// What a handler can learn about the call that it serves.
//
//   at::Tensor step(at::Tensor state) {
//     while (!converged(state)) {
//       rpc::this_call().check();   // throws Aborted when the result is not needed any more
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
  // The worker that called; outside of a handler a WorkerInfo with name "" and id -1.
  const WorkerInfo& caller() const;
  std::string function() const;
  // True when the result is not needed any more: the caller cancelled the call, timed out or died, or this worker shuts
  // down.
  bool cancelled() const;
  void check() const;  // Aborted if cancelled()

 private:
  friend ThisCall this_call();
  std::shared_ptr<IncomingCall> call_;
};

ThisCall this_call();

}  // namespace muster::rpc
