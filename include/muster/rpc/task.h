// Task<T>: a coroutine, for handlers that wait without blocking a thread.
//
//   rpc::Task<at::Tensor> act(at::Tensor state) {
//     at::Tensor batch = co_await batcher.add(state);                  // a Future
//     co_return co_await rpc::async<&forward>("gpu", batch);
//   }
//   rpc::sync<&act>("agent", state);                                   // the handler of a call
//   Future<at::Tensor> y = rpc::start(act(state));                     // or here
//
// A Task is lazy: nothing runs before it is awaited or started. It is awaited once. Its exception goes to the coroutine
// that awaits it. Awaiting one Task after another uses no stack, even in a build without optimization; Tasks that await
// Tasks use stack as nested function calls do. Destroying a Task that is not started destroys its frame; a running one
// is owned by the coroutine that awaits it, or by itself (start()).
//
// After `co_await future` the coroutine goes on where the future's continuations run (future.h): perhaps in another
// thread, so it must not hold a lock across a co_await. rpc::this_call() stays the same.
//
// A lambda that is a coroutine must not capture, or must outlive its Task: this is a rule of C++. Parameters of a
// handler, references too, live until the handler has ended.
//
// Thread-safety: a Task belongs to one thread at a time.
#pragma once

#include <atomic>
#include <coroutine>
#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

#include "muster/rpc/future.h"

namespace muster::rpc {

template <typename T>
class Task;

namespace detail {

// Two events let the awaiting coroutine go on: it has run the awaited one up to its first wait, and the awaited one has
// ended, perhaps in another thread. The second of the two events resumes it. So a coroutine that ends without a wait is
// a call that returns. Symmetric transfer would keep a stack frame for each if the compiler does not make a tail call
// of it (GCC before 15 without -O2, or with a sanitizer).
class TaskPromiseBase {
 public:
  struct AtEnd {
    bool await_ready() noexcept { return false; }
    template <typename P>
    std::coroutine_handle<> await_suspend(std::coroutine_handle<P> ended) noexcept {
      TaskPromiseBase& promise = ended.promise();
      const std::coroutine_handle<> awaiting = promise.awaiting_;
      // If this is the first of the two events, another thread may destroy this frame right after the exchange.
      return promise.meets_.exchange(true, std::memory_order_acq_rel) ? awaiting : std::noop_coroutine();
    }
    void await_resume() noexcept {}
  };
  std::suspend_always initial_suspend() noexcept { return {}; }
  AtEnd final_suspend() noexcept { return {}; }
  void unhandled_exception() noexcept { error_ = std::current_exception(); }

  // Runs this coroutine, whose frame is `own`, up to its first wait. Returns whether `awaiting` must be suspended until
  // this coroutine has ended.
  bool run_for(std::coroutine_handle<> awaiting, std::coroutine_handle<> own) noexcept {
    awaiting_ = awaiting;
    own.resume();
    return !meets_.exchange(true, std::memory_order_acq_rel);
  }

 protected:
  std::coroutine_handle<> awaiting_;
  std::atomic<bool> meets_ = false;
  std::exception_ptr error_;
};

template <typename T>
class TaskPromise : public TaskPromiseBase {
 public:
  Task<T> get_return_object() noexcept;
  template <typename V>
  requires std::is_convertible_v<V&&, T>
  void return_value(V&& value) { value_.emplace(std::forward<V>(value)); }
  T take() {
    if (error_) std::rethrow_exception(error_);
    return std::move(*value_);
  }

 private:
  std::optional<T> value_;
};

template <>
class TaskPromise<void> : public TaskPromiseBase {
 public:
  Task<void> get_return_object() noexcept;
  void return_void() noexcept {}
  void take() {
    if (error_) std::rethrow_exception(error_);
  }
};

// A coroutine that runs immediately and frees itself: the root of a started Task. Its body must not throw.
struct Detached {
  struct promise_type {
    Detached get_return_object() noexcept { return {}; }
    std::suspend_never initial_suspend() noexcept { return {}; }
    std::suspend_never final_suspend() noexcept { return {}; }
    void return_void() noexcept {}
    void unhandled_exception() noexcept { std::terminate(); }
  };
};

}  // namespace detail

template <typename T = void>
class [[nodiscard]] Task {
 public:
  using Value = T;
  using promise_type = detail::TaskPromise<T>;

  Task(Task&& other) noexcept : frame_(std::exchange(other.frame_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(frame_, other.frame_);
    return *this;
  }
  ~Task() {
    if (frame_) frame_.destroy();
  }

  struct Awaiter {
    std::coroutine_handle<promise_type> frame;
    bool await_ready() noexcept { return false; }
    bool await_suspend(std::coroutine_handle<> awaiting) noexcept { return frame.promise().run_for(awaiting, frame); }
    T await_resume() { return frame.promise().take(); }
  };
  Awaiter operator co_await() noexcept { return Awaiter{frame_}; }

 private:
  friend promise_type;
  explicit Task(std::coroutine_handle<promise_type> frame) noexcept : frame_(frame) {}
  std::coroutine_handle<promise_type> frame_;
};

namespace detail {
template <typename T>
Task<T> TaskPromise<T>::get_return_object() noexcept {
  return Task<T>(std::coroutine_handle<TaskPromise>::from_promise(*this));
}
inline Task<void> TaskPromise<void>::get_return_object() noexcept {
  return Task<void>(std::coroutine_handle<TaskPromise>::from_promise(*this));
}

template <typename T>
Detached drive(Task<T> task, StateRef<FutureStateOf<T>> state) {
  std::optional<NotVoid<T>> value;
  std::exception_ptr error;
  try {
    const Task<T> running = std::move(task);  // its frame is destroyed before the future completes
    if constexpr (std::is_void_v<T>) {
      co_await const_cast<Task<T>&>(running);
    } else {
      value.emplace(co_await const_cast<Task<T>&>(running));
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    state->try_set_error(std::move(error));
  } else {
    state->try_set_from([&]() -> T {
      if constexpr (!std::is_void_v<T>) return std::move(*value);
    });
  }
}
}  // namespace detail

// Runs the task, in this thread up to its first wait. The task goes on if the future is cancelled or dropped.
template <typename T>
Future<T> start(Task<T> task, Waits* waits = nullptr) {
  detail::StateRef<detail::FutureStateOf<T>> state(new detail::FutureStateOf<T>(waits));
  // A guard that the task holds while it waits, such as a NoGradGuard, is not this thread's.
  const detail::CallContext::Scope here(detail::CallContext::here());
  detail::drive(std::move(task), state);
  return Future<T>(state);
}

template <typename T>
inline constexpr bool is_task = false;
template <typename T>
inline constexpr bool is_task<Task<T>> = true;

}  // namespace muster::rpc
