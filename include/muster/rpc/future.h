// Futures: results that arrive later, from another worker or from this process.
//
//   auto y = rpc::async<&forward>("worker1", x);          // Future<at::Tensor>
//   auto loss = y.then([](Future<at::Tensor> y) { return y.get().sum(); });
//   if (!loss.wait_for(5s)) loss.cancel();
//   at::Tensor here = co_await y;                         // in a Task (task.h)
//
// A Future is a handle; its copies refer to the same result. The first of these events completes it, with a value or
// an error: the answer, the timeout of the call, the loss of the worker, cancel(). Later events have no effect;
// try_set_value(), try_set_error() and cancel() then return false.
//
//   get()            waits, and returns a copy, or throws the error; any number of times. std::move(future).get() moves
//                    the value out, for all handles: use it only if no other thread uses a copy of the handle.
//   wait, wait_for   return when the future is complete (wait_for: whether it is); never throw the error.
//   then(fn)         calls fn(Future<T>) when the future is complete. If it already is, in this thread, immediately;
//                    else in a thread of the agent or, if the future does not belong to one, of whoever completes it;
//                    in that thread's grad mode and Context. What fn returns or throws completes what then() returned.
//   cancel()         completes the future with Aborted, if it is not complete, and asks the callee to stop. Returns
//                    whether it did. Cancelling a future from then(), when_all() or when_any() does not cancel the
//                    futures that it waits for.
//   when_all         the values of all, or the first error as soon as there is one.
//   when_any         the index of the first that is complete, with value or error. Each call leaves something with each
//                    future until that is complete: do not call it again and again with one that never is.
//
// A Promise that is destroyed without a value completes its future with Aborted, so waits end. The future of a call
// completes at the call's timeout at the latest.
//
// How it works: a future is one allocation, with an atomic word (bits claimed, ready and sleepers) and an atomic stack
// of continuations that is closed on completion. Completing it costs two atomic operations and a third for the
// continuations; a system call only if a thread sleeps. No lock is held while a continuation runs. Continuations that
// become due while one runs in the same thread wait until that one ends (no recursion), or blocks in wait() or get().
//
// Thread-safety: any thread may call any function. Only the value is not protected: get() of a copy while another
// thread moves the value out is a data race of the program.
#pragma once

#include <atomic>
#include <chrono>
#include <coroutine>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "muster/base/deadline.h"
#include "muster/base/error.h"

namespace muster::rpc {

namespace detail {
class FutureState;
}

// Makes progress for futures that are not complete. The agent is the Waits of its calls' futures and of futures made
// from them. It must live until all its futures are complete, and must complete them also if no thread waits.
class Waits {
 public:
  // Returns when `state` is done or the deadline has passed, and whether it is done. `state` may have no Waits of its
  // own, if a thread of the agent waits for it (WaitsOfThread).
  virtual bool wait(detail::FutureState& state, Deadline deadline) = 0;
  // Runs a continuation, or resumes a coroutine, in a thread where it may block: now or later. Must not throw and must
  // not drop the continuation.
  virtual void run(std::function<void()> continuation) = 0;
  // Tells that the user has just completed `state` with Aborted. Called for derived states (then, when_all) too.
  virtual void cancel(detail::FutureState& state) = 0;

 protected:
  ~Waits() = default;
};

namespace detail {

// What happens when a state is complete. A Continuation owns itself: run() is called once, and may destroy it.
class Continuation {
 public:
  virtual void run() noexcept = 0;

 protected:
  ~Continuation() = default;

 private:
  friend class FutureState;
  friend class ContinuationQueue;
  Continuation* next_ = nullptr;
};

// The state that handles share, without the value. To complete it: claim(), store value or error, publish().
class FutureState {
 public:
  explicit FutureState(Waits* waits = nullptr) : waits_(waits) {}
  FutureState(const FutureState&) = delete;
  FutureState& operator=(const FutureState&) = delete;
  virtual ~FutureState() = default;

  bool done() const noexcept { return word_.load(std::memory_order_acquire) & kReady; }
  // True for the one caller that may complete the state. That caller must then call publish(), and must hold a
  // reference until publish() returns.
  bool claim() noexcept { return !(word_.fetch_or(kClaimed, std::memory_order_acq_rel) & kClaimed); }
  bool claimed() const noexcept { return word_.load(std::memory_order_acquire) & kClaimed; }
  void set_error(std::exception_ptr error) noexcept { error_ = std::move(error); }  // between claim() and publish()
  void publish() noexcept;

  bool try_set_error(std::exception_ptr error) noexcept {
    if (!claim()) return false;
    set_error(std::move(error));
    publish();
    return true;
  }
  const std::exception_ptr& error() const noexcept { return error_; }  // once done(); null: there is a value

  bool wait(Deadline deadline);           // through waits(), else through the thread's Waits, else sleep()
  bool sleep(Deadline deadline);          // in this thread, on a futex
  bool add(Continuation& then) noexcept;  // false: the state is done already; `then` was not taken
  bool cancel();
  Waits* waits() const noexcept { return waits_; }

  void retain() noexcept { references_.fetch_add(1, std::memory_order_relaxed); }
  void release() noexcept {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 private:
  static constexpr uint32_t kClaimed = 1, kReady = 2, kSleepers = 4;
  static Continuation* closed() noexcept { return reinterpret_cast<Continuation*>(1); }

  std::atomic<uint32_t> word_{0};
  std::atomic<uint32_t> references_{0};
  std::atomic<Continuation*> continuations_{nullptr};
  Waits* const waits_;
  std::exception_ptr error_;
};

// Sets the Waits through which this thread waits for futures that have none of their own. An agent's threads have one,
// so that a handler gives up its place in the thread pool no matter what it waits for.
class WaitsOfThread {
 public:
  explicit WaitsOfThread(Waits* waits) noexcept;
  ~WaitsOfThread();
  WaitsOfThread(const WaitsOfThread&) = delete;
  WaitsOfThread& operator=(const WaitsOfThread&) = delete;

 private:
  Waits* before_;
};

template <typename S>
class StateRef {  // intrusive: an agent can keep the pointer in a table and rebuild the handle
 public:
  StateRef() = default;
  explicit StateRef(S* state) noexcept : state_(state) {
    if (state_) state_->retain();
  }
  StateRef(const StateRef& other) noexcept : StateRef(other.state_) {}
  StateRef(StateRef&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  template <typename Derived>
  requires std::is_convertible_v<Derived*, S*> StateRef(const StateRef<Derived>& other)
  noexcept : StateRef(other.get()) {}
  StateRef& operator=(StateRef other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~StateRef() {
    if (state_) state_->release();
  }
  S* get() const noexcept { return state_; }
  S* operator->() const noexcept { return state_; }
  S& operator*() const noexcept { return *state_; }
  explicit operator bool() const noexcept { return state_ != nullptr; }

 private:
  S* state_ = nullptr;
};

template <typename T>
using NotVoid = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

// A state with its value. An agent may derive from it, to keep what belongs to the call in the same allocation.
template <typename T>
class FutureStateOf : public FutureState {
 public:
  using FutureState::FutureState;

  // Completes the state with what make() returns or throws. Returns false without calling make() if the state was
  // claimed before.
  template <typename Make>
  bool try_set_from(Make&& make) noexcept {
    if (!claim()) return false;
    set_from(std::forward<Make>(make));
    return true;
  }
  // The same for a caller that has claimed the state.
  template <typename Make>
  void set_from(Make&& make) noexcept {
    try {
      if constexpr (std::is_void_v<T>) {
        std::forward<Make>(make)();
        value_.emplace();
      } else {
        value_.emplace(std::forward<Make>(make)());
      }
    } catch (...) {
      set_error(std::current_exception());
    }
    publish();
  }
  NotVoid<T>& value() {  // once done(); throws the error
    if (error()) std::rethrow_exception(error());
    return *value_;
  }

 private:
  std::optional<NotVoid<T>> value_;
};

// What belongs to the running call and not to the thread. A coroutine keeps it across each co_await, also if it goes on
// in another thread.
struct CallContext {
  std::shared_ptr<void> call;  // for rpc::this_call(): the agent's record of the call; it may outlive the call
  bool grad_mode = true;       // libtorch's

  static CallContext here();  // the thread's context
  class Scope;                // makes a context the thread's
};
class CallContext::Scope {
 public:
  explicit Scope(CallContext context) noexcept;
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  CallContext before_;
};
const std::shared_ptr<void>& current_call() noexcept;

[[noreturn]] void throw_empty_future();

template <typename T, bool kTake>
class FutureAwaiter;

}  // namespace detail

template <typename T>
class Future {
 public:
  using Value = T;
  using State = detail::FutureStateOf<T>;

  Future() = default;  // without a result: valid() is false, all other methods throw InvalidArgument
  explicit Future(detail::StateRef<State> state) : state_(std::move(state)) {}

  bool valid() const noexcept { return static_cast<bool>(state_); }
  bool done() const { return state().done(); }
  void wait() const { state().wait(Deadline::never()); }
  template <typename Rep, typename Period>
  bool wait_for(std::chrono::duration<Rep, Period> timeout) const {
    return state().wait(Deadline::after(timeout));
  }

  T get() const& {
    wait();
    if constexpr (std::is_void_v<T>) {
      state().value();
    } else {
      static_assert(std::is_copy_constructible_v<T>, "this value can only be moved: std::move(future).get()");
      return state().value();
    }
  }
  T get() && {
    const Future self = std::move(*this);
    self.wait();
    if constexpr (std::is_void_v<T>) {
      self.state().value();
    } else {
      return std::move(self.state().value());
    }
  }
  bool cancel() const { return state().cancel(); }

  template <typename F>
  auto then(F&& function) const -> Future<std::invoke_result_t<std::decay_t<F>&, Future<T>>>;

  detail::FutureAwaiter<T, false> operator co_await() const& { return detail::FutureAwaiter<T, false>(*this); }
  detail::FutureAwaiter<T, true> operator co_await() && { return detail::FutureAwaiter<T, true>(std::move(*this)); }

  // For code that completes or awaits the state directly.
  State& state() const {
    if (!state_) detail::throw_empty_future();
    return *state_;
  }

 private:
  detail::StateRef<State> state_;
};

// The other end of a future that this process completes. Not copied; may be moved to another thread.
template <typename T>
class Promise {
 public:
  explicit Promise(Waits* waits = nullptr) : state_(new detail::FutureStateOf<T>(waits)) {}
  Promise(Promise&&) noexcept = default;
  Promise& operator=(Promise&& other) noexcept {
    if (this != &other) {
      abandon();
      state_ = std::move(other.state_);
    }
    return *this;
  }
  ~Promise() { abandon(); }

  Future<T> future() const { return Future<T>(state_); }
  // Returns true if this call completed the future: it had not been completed or cancelled before. Several threads may
  // call it.
  template <typename... V>
  bool try_set_value(V&&... value) {
    return state_->try_set_from([&]() -> T {
      if constexpr (!std::is_void_v<T>) return T(std::forward<V>(value)...);
    });
  }
  bool try_set_error(std::exception_ptr error) { return state_->try_set_error(std::move(error)); }
  template <typename E>
  requires(!std::is_same_v<std::decay_t<E>, std::exception_ptr>) bool try_set_error(E&& error) {
    return try_set_error(std::make_exception_ptr(std::forward<E>(error)));
  }
  bool cancelled() const noexcept { return state_->claimed(); }  // before this Promise set anything

 private:
  void abandon() noexcept {
    if (state_ && !state_->claimed())
      state_->try_set_error(std::make_exception_ptr(Aborted("a future's promise was destroyed before it had a value")));
  }
  detail::StateRef<detail::FutureStateOf<T>> state_;
};

template <typename T>
Future<std::decay_t<T>> make_ready_future(T&& value) {
  Promise<std::decay_t<T>> promise;
  promise.try_set_value(std::forward<T>(value));
  return promise.future();
}
inline Future<void> make_ready_future() {
  Promise<void> promise;
  promise.try_set_value();
  return promise.future();
}
template <typename T>
Future<T> make_failed_future(std::exception_ptr error) {
  Promise<T> promise;
  promise.try_set_error(std::move(error));
  return promise.future();
}

// For futures of T: a vector of the values, or nothing for Future<void>.
template <typename T>
Future<std::conditional_t<std::is_void_v<T>, void, std::vector<detail::NotVoid<T>>>> when_all(
    std::vector<Future<T>> futures);
// A tuple of the values; std::monostate for a Future<void>.
template <typename... T>
Future<std::tuple<detail::NotVoid<T>...>> when_all(Future<T>... futures);
// InvalidArgument if there are none.
template <typename T>
Future<size_t> when_any(std::vector<Future<T>> futures);

}  // namespace muster::rpc

#include "muster/rpc/future_impl.h"  // IWYU pragma: export
