// Remote calls: any function or object of any worker.
//
//   at::Tensor forward(at::Tensor x);
//   at::Tensor y         = rpc::sync<&forward>("worker1", x);           // waits
//   Future<at::Tensor> f = rpc::async<&forward>("worker1", x);          // future.h
//   RRef<at::Tensor> r   = rpc::remote<&forward>("worker1", x);         // the result stays there: rref.h
//   RRef<Server> server  = rpc::remote<Server>("ps", config);           // an object made there
//   at::Tensor w         = server.sync<&Server::pull>(keys);            // and called
//   rpc::sync<&forward>({"worker1", {.timeout = 100ms}}, x);
//
// Functions need no registration: it is enough to name &forward here, in a program that both workers run (function.h).
// A function may be a coroutine that returns Task<R> (task.h). serialize.h lists the types of arguments and results.
//
// Arguments are packed before the call returns, converted to the types of the function's parameters. A tensor that is
// moved in, and that has no other holder, is handed over without a copy if it lives in World::heap() (or came from that
// worker); other tensors are copied once. The callee owns the arguments that it gets: the caller does not see what the
// callee does to them.
//
// Handlers of one worker run in any order and concurrently.
//
// Errors, thrown by sync and get(): RemoteError (what the function threw), PeerLost (the worker died or
// left: within 100 ms on one host), TimeoutError (Options::timeout or the call's own; the callee is told to stop),
// Aborted (cancelled; RPC was shut down). Thrown by the call itself: InvalidArgument (no such worker, an argument that
// cannot be sent), Aborted (RPC is not running here), TimeoutError (Options::max_calls calls to the worker, or
// max_call_bytes of them, were unanswered until the call's deadline; calls that were cancelled or timed out count until
// the worker has answered them).
//
// Thread-safety: all functions, in threads whose current World runs RPC, such as the threads of handlers.
// Source: torch.distributed.rpc, rpc_sync, rpc_async, remote.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "muster/rpc/function.h"
#include "muster/rpc/future.h"
#include "muster/rpc/payload.h"
#include "muster/rpc/serialize.h"
#include "muster/rpc/worker.h"

namespace muster::rpc {

struct CallOptions {
  std::optional<std::chrono::milliseconds> timeout;  // 0: none; below 0, as after a deadline: TimeoutError immediately
};

// The worker that a call goes to, by name or by rank.
class To {
 public:
  To(const char* name, CallOptions options = {}) : To(std::string_view(name), options) {}
  To(const std::string& name, CallOptions options = {}) : To(std::string_view(name), options) {}
  To(std::string_view name, CallOptions options = {});
  To(int rank, CallOptions options = {});
  To(const WorkerInfo& worker, CallOptions options = {}) : To(worker.id, options) {}

  int rank() const { return rank_; }
  const CallOptions& options() const { return options_; }

 private:
  int rank_;
  CallOptions options_;
};

namespace detail {

struct CallSpec {
  const Function* function = nullptr;
  uint64_t object = 0;  // the object that the function is called on
  bool store = false;
  uint64_t result = 0;  // the id of the stored result
  std::optional<std::chrono::milliseconds> timeout;
  bool is_sent_in_time = false;  // whether Options::timeout limits the time to send it, even if `timeout` is none
};

// What an agent keeps of a call that is under way.
class PendingCall {
 public:
  virtual FutureState& state() = 0;
  virtual void succeed(PayloadReader& result) = 0;  // does not throw: a parse error becomes the future's error

  int to = 0;
  uint64_t id = 0;
  const Function* function = nullptr;
  Deadline deadline = Deadline::never();
  std::shared_ptr<void> sent;  // for the layer above, which gets it back with the result

 protected:
  ~PendingCall() = default;
};

template <typename R>
class CallState final : public FutureStateOf<R>, public PendingCall {
 public:
  using FutureStateOf<R>::FutureStateOf;
  FutureState& state() override { return *this; }
  void succeed(PayloadReader& result) override {
    this->try_set_from([&]() -> R {
      if constexpr (!std::is_void_v<R>) return std::get<0>(unpack<R>(result));
    });
  }
};

Waits* waits();
// Throws InvalidArgument for an argument that cannot be sent; any other failure completes the state with an error.
void start_call(int to, const CallSpec& spec, Payload payload, PendingCall& call);

template <typename R>
Future<R> call(int to, const CallSpec& spec, Payload payload) {
  StateRef<CallState<R>> state(new CallState<R>(waits()));
  start_call(to, spec, std::move(payload), *state);
  return Future<R>(state);
}

template <auto F>
constexpr void must_not_need_an_object() {
  static_assert(std::is_void_v<object_of<F>>,
                "this function is a member, or its first parameter is a reference that it could write to: call it on "
                "an RRef, or take the parameter by value and return the value instead");
}

}  // namespace detail

template <auto F, typename... A>
Future<result_of<F>> async(const To& to, A&&... args) {
  detail::must_not_need_an_object<F>();
  return detail::call<result_of<F>>(to.rank(), {.function = &function_of<F>(), .timeout = to.options().timeout},
                                    pack_for<arguments_of<F>>(std::forward<A>(args)...));
}

template <auto F, typename... A>
result_of<F> sync(const To& to, A&&... args) {
  return async<F>(to, std::forward<A>(args)...).get();
}

}  // namespace muster::rpc
