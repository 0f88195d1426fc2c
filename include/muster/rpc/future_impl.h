// The templates of future.h; include that one.
#pragma once

#include "muster/rpc/future.h"

namespace muster::rpc {
namespace detail {

// Has `then` run when `state` is done, or runs it now if it is done already.
inline void when_done(FutureState& state, Continuation& then) noexcept {
  if (!state.add(then)) then.run();
}

template <typename T, typename R, typename F>
class Then final : public Continuation {
 public:
  Then(Future<T> input, F function) : input_(std::move(input)), function_(std::move(function)) {}
  Then(Future<T> input, F function, StateRef<FutureStateOf<R>> output)
      : input_(std::move(input)), output_(std::move(output)), function_(std::move(function)) {}
  void run() noexcept override {
    const std::unique_ptr<Then> self(this);
    // A claimed output was cancelled: its result is not needed.
    if (output_->claimed()) return;
    std::optional<NotVoid<R>> value;
    std::exception_ptr error;
    try {
      if constexpr (std::is_void_v<R>) {
        function_(std::move(input_));
      } else {
        value.emplace(function_(std::move(input_)));
      }
    } catch (...) {
      error = std::current_exception();
    }
    if (error) {
      output_->try_set_error(std::move(error));
    } else {
      output_->try_set_from([&]() -> R {
        if constexpr (!std::is_void_v<R>) return std::move(*value);
      });
    }
  }

 private:
  Future<T> input_;
  StateRef<FutureStateOf<R>> output_;
  F function_;
};

template <typename T, bool kTake>
class FutureAwaiter final : public Continuation {
 public:
  explicit FutureAwaiter(Future<T> future) : future_(std::move(future)) {}
  bool await_ready() const { return future_.done(); }
  bool await_suspend(std::coroutine_handle<> awaiting) {
    awaiting_ = awaiting;
    context_ = CallContext::here();
    // After add(), another thread may resume the coroutine, which destroys *this: no member may be touched any more.
    return future_.state().add(*this);
  }
  T await_resume() {
    if constexpr (kTake) {
      return std::move(future_).get();
    } else {
      return std::as_const(future_).get();
    }
  }
  void run() noexcept override {
    const CallContext::Scope scope(std::move(context_));
    awaiting_.resume();  // may destroy *this
  }

 private:
  Future<T> future_;
  std::coroutine_handle<> awaiting_;
  CallContext context_;
};

template <typename T>
NotVoid<T> value_of(const Future<T>& future) {
  if constexpr (std::is_void_v<T>) {
    future.get();
    return {};
  } else if constexpr (std::is_copy_constructible_v<T>) {
    return future.get();
  } else {
    return Future<T>(future).get();
  }
}

// The state of when_all(): each input counts `left` down; the first error completes the output immediately.
template <typename R, typename Inputs>
struct Gather {
  explicit Gather(Inputs given, size_t count, Waits* waits)
      : inputs(std::move(given)), left(count), output(new FutureStateOf<R>(waits)) {}
  Inputs inputs;
  std::atomic<size_t> left;
  StateRef<FutureStateOf<R>> output;
};

template <typename State, typename Collect>
class Arrival final : public Continuation {
 public:
  Arrival(std::shared_ptr<State> all, FutureState& input, Collect collect)
      : all_(std::move(all)), input_(&input), collect_(std::move(collect)) {}
  void run() noexcept override {
    const std::unique_ptr<Arrival> self(this);
    if (input_->error()) all_->output->try_set_error(input_->error());
    if (all_->left.fetch_sub(1, std::memory_order_acq_rel) == 1)
      all_->output->try_set_from([this] { return collect_(all_->inputs); });
  }

 private:
  std::shared_ptr<State> all_;
  FutureState* input_;  // kept alive by all_->inputs
  Collect collect_;
};

template <typename State, typename Collect>
void arrive(const std::shared_ptr<State>& all, FutureState& input, Collect collect) {
  when_done(input, *new Arrival<State, Collect>(all, input, std::move(collect)));
}

class First final : public Continuation {
 public:
  First(StateRef<FutureStateOf<size_t>> output, size_t index) : output_(std::move(output)), index_(index) {}
  void run() noexcept override {
    const std::unique_ptr<First> self(this);
    output_->try_set_from([this] { return index_; });
  }

 private:
  StateRef<FutureStateOf<size_t>> output_;
  size_t index_;
};

// The Waits of a future that is made from others: the Waits that all of them have in common, else none. Waiting through
// one of several would not serve the others, and each of them makes progress by itself, too.
inline void same_waits(Waits*& common, bool& first, Waits* another) {
  if (first) common = another;
  if (common != another) common = nullptr;
  first = false;
}
template <typename T>
Waits* common_waits(const std::vector<Future<T>>& futures) {
  Waits* common = nullptr;
  bool first = true;
  for (const auto& future : futures) same_waits(common, first, future.state().waits());
  return common;
}

[[noreturn]] void throw_no_futures();

}  // namespace detail

template <typename T>
template <typename F>
auto Future<T>::then(F&& function) const -> Future<std::invoke_result_t<std::decay_t<F>&, Future<T>>> {
  using R = std::invoke_result_t<std::decay_t<F>&, Future<T>>;
  detail::StateRef<detail::FutureStateOf<R>> output(new detail::FutureStateOf<R>(state().waits()));
  detail::when_done(state(), *new detail::Then<T, R, std::decay_t<F>>(*this, std::forward<F>(function), output));
  return Future<R>(output);
}

template <typename T>
Future<std::conditional_t<std::is_void_v<T>, void, std::vector<detail::NotVoid<T>>>> when_all(
    std::vector<Future<T>> futures) {
  using R = std::conditional_t<std::is_void_v<T>, void, std::vector<detail::NotVoid<T>>>;
  using Inputs = std::vector<Future<T>>;
  const auto collect = [](Inputs& inputs) -> R {
    if constexpr (!std::is_void_v<T>) {
      std::vector<T> values;
      values.reserve(inputs.size());
      for (const auto& input : inputs) values.push_back(detail::value_of(input));
      return values;
    }
  };
  Waits* const waits = detail::common_waits(futures);
  const size_t count = futures.size();
  const auto all = std::make_shared<detail::Gather<R, Inputs>>(std::move(futures), count, waits);
  const Future<R> result(all->output);
  if (count == 0) all->output->try_set_from([&] { return collect(all->inputs); });
  for (size_t i = 0; i < count; ++i) detail::arrive(all, all->inputs[i].state(), collect);
  return result;
}

template <typename... T>
Future<std::tuple<detail::NotVoid<T>...>> when_all(Future<T>... futures) {
  using R = std::tuple<detail::NotVoid<T>...>;
  using Inputs = std::tuple<Future<T>...>;
  const auto collect = [](Inputs& inputs) {
    return std::apply([](auto&... each) { return R{detail::value_of(each)...}; }, inputs);
  };
  Waits* waits = nullptr;
  bool first = true;
  (detail::same_waits(waits, first, futures.state().waits()), ...);
  const auto all = std::make_shared<detail::Gather<R, Inputs>>(Inputs{std::move(futures)...}, sizeof...(T), waits);
  const Future<R> result(all->output);
  if constexpr (sizeof...(T) == 0) all->output->try_set_from([] { return R{}; });
  std::apply([&](auto&... each) { (detail::arrive(all, each.state(), collect), ...); }, all->inputs);
  return result;
}

template <typename T>
Future<size_t> when_any(std::vector<Future<T>> futures) {
  if (futures.empty()) detail::throw_no_futures();
  detail::StateRef<detail::FutureStateOf<size_t>> output(
      new detail::FutureStateOf<size_t>(detail::common_waits(futures)));
  for (size_t i = 0; i < futures.size(); ++i) detail::when_done(futures[i].state(), *new detail::First(output, i));
  return Future<size_t>(output);
}

}  // namespace muster::rpc
