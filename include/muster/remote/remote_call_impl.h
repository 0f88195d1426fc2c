// The templates of remote_call.h; include that one.
#pragma once

#include <ATen/ThreadLocalState.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <string>

#include "muster/remote/remote_call.h"
#include "muster/remote/team.h"

namespace muster::detail {

// The same error, of the same kind, with the number of the part added.
std::exception_ptr error_of_part(const std::exception_ptr& error, size_t part, size_t parts);

template <typename R>
using PartCalls = std::vector<rpc::Future<R>>;

template <typename R>
void cancel_all(const PartCalls<R>& calls) {
  for (const auto& call : calls) call.cancel();
}

// The ranks of any_worker()'s workers; null: of all, or it is a certain worker. `like` if they are the same.
Team::Workers candidates(const WorkerId& worker, const Team::Workers& like);

template <auto F, typename Options, typename... A>
PartCalls<rpc::result_of<F>> start_parts(std::vector<RemotePart<A...>> parts, const Options& options) {
  if (options.max_retries < 0)
    throw InvalidArgument("remote_call: .max_retries: expected 0 or more, got " + std::to_string(options.max_retries));
  std::vector<int> workers, named;  // all looked up before anything is sent; -1: any of `among`
  std::vector<Team::Workers> among;
  bool any = false;
  for (const auto& part : parts) {
    workers.push_back(part.worker.among() ? -1 : part.worker.to().rank());
    among.push_back(candidates(part.worker, among.empty() ? nullptr : among.back()));
    any = any || workers.back() < 0;
    if (workers.back() >= 0) named.push_back(workers.back());
    if (among.back()) named.insert(named.end(), among.back()->begin(), among.back()->end());
  }
  const auto team = any || options.max_retries > 0 ? Team::make(std::move(named)) : nullptr;
  PartCalls<rpc::result_of<F>> calls;
  calls.reserve(parts.size());
  try {
    for (size_t i = 0; i < parts.size(); ++i) {
      auto& arguments = parts[i].arguments;
      if (!team) {
        const rpc::To to(workers[i], {.timeout = options.timeout});
        calls.push_back(std::apply([&](A&... each) { return rpc::async<F>(to, std::move(each)...); }, arguments));
        continue;
      }
      const auto part = std::make_shared<Part<F>>(
          team,
          std::apply([](A&... each) { return rpc::pack_for<rpc::arguments_of<F>>(std::move(each)...); }, arguments),
          options.timeout, options.max_retries);
      calls.push_back(workers[i] < 0 ? part->start_on_any(among[i]) : part->start(workers[i]));
    }
  } catch (...) {
    cancel_all(calls);
    std::rethrow_exception(error_of_part(std::current_exception(), calls.size(), parts.size()));
  }
  return calls;
}

// Complete when all calls have succeeded or one has failed.
template <typename R>
rpc::Future<void> when_over(const PartCalls<R>& calls) {
  struct Countdown {
    Countdown(size_t count, rpc::Waits* waits) : left(count), over(waits) {}
    std::atomic<size_t> left;
    rpc::Promise<void> over;
  };
  if (calls.empty()) return rpc::make_ready_future();
  const auto countdown = std::make_shared<Countdown>(calls.size(), calls[0].state().waits());
  for (const auto& call : calls)
    call.then([countdown](const rpc::Future<R>& done) {
      if (done.state().error() || countdown->left.fetch_sub(1, std::memory_order_acq_rel) == 1)
        countdown->over.try_set_value();
    });
  return countdown->over.future();
}

// Waits in this thread until when_over(calls). It fetches answers that come soon by itself; each answer that comes
// later costs the wake-up of a thread.
template <typename R>
void wait_until_over(const PartCalls<R>& calls) {
  const auto soon = Deadline::after(std::chrono::milliseconds(1));
  for (const auto& call : calls) {
    if (!call.state().wait(soon)) return when_over(calls).wait();
    if (call.state().error()) return;
  }
}

// The results, once when_over(calls) is complete. If a part failed, cancels the other parts and throws its error.
template <typename R>
PartResults<R> take_results(PartCalls<R>& calls) {
  for (size_t part = 0; part < calls.size(); ++part) {
    if (!calls[part].done() || !calls[part].state().error()) continue;
    cancel_all(calls);
    std::rethrow_exception(error_of_part(calls[part].state().error(), part, calls.size()));
  }
  PartResults<R> results;
  results.reserve(calls.size());
  for (auto& call : calls) {
    if constexpr (std::is_void_v<R>) {
      results.emplace_back();
    } else {
      results.push_back(std::move(call).get());
    }
  }
  return results;
}

template <auto F, typename U>
struct SyncCall {
  using Mapped = MapResult<F>;
  using Reduced = U;

  template <typename Finish>
  static auto run(std::vector<rpc::Future<rpc::result_of<F>>> calls, Finish finish) {
    wait_until_over(calls);
    return finish(take_results(calls));
  }
};

template <auto F, typename U>
struct AsyncCall {
  using Mapped = rpc::Future<MapResult<F>>;
  using Reduced = rpc::Future<U>;

  template <typename Finish>
  static auto run(std::vector<rpc::Future<rpc::result_of<F>>> calls, Finish finish) {
    auto result = when_over(calls).then(
        [calls, finish = std::move(finish), state = at::ThreadLocalState()](const rpc::Future<void>&) mutable {
          const at::ThreadLocalStateGuard guard(state);
          return finish(take_results(calls));
        });
    // Cancelling the result cancels the parts; if the result fails, the parts that still run are cancelled.
    result.then([calls](const auto&) { cancel_all(calls); });
    return result;
  }
};

// An argument for a parameter whose held type is P. It converts what rpc::async converts.
template <typename P>
struct Given {
  P value;
  template <typename A>
  requires(!std::same_as<std::remove_cvref_t<A>, Given> &&
           (std::is_convertible_v<A&&, P> || requires(A && given) { P(std::begin(given), std::end(given)); }))
      Given(A&& given)
      : value(make(std::forward<A>(given))) {}

 private:
  template <typename A>
  static P make(A&& given) {
    if constexpr (std::is_convertible_v<A&&, P>) {
      return std::forward<A>(given);
    } else {
      return P(std::begin(given), std::end(given));
    }
  }
};

// The call operators of remote_sync_call<F, U>. Their parameters have the types of F's, because options could not be
// written in braces otherwise. How is SyncCall or AsyncCall.
template <typename How, auto F, typename U, typename... P>
class RemoteCall<How, F, U, std::tuple<P...>> {
  static_assert(std::is_void_v<rpc::object_of<F>>,
                "this function is called on an object: call it through the object's RRef");
  static_assert((std::copy_constructible<P> && ...),
                "the arguments are copied to each part, and one of these can only be moved: use rpc::async, or a "
                "shared_ptr");

  // Whether the leading types of A, one per parameter, convert to the parameters.
  template <typename A, size_t... I>
  static constexpr bool fit(std::index_sequence<I...>) {
    if constexpr (sizeof...(I) == sizeof...(P))
      return (std::is_convertible_v<std::tuple_element_t<I, A>, Given<P>> && ...);
    return false;
  }
  template <typename Last>
  static constexpr bool is_options = std::same_as<std::remove_cvref_t<Last>, MapOptions<F>> ||
                                     std::same_as<std::remove_cvref_t<Last>, MapReduceOptions<F, U>>;
  template <typename... A>
  static constexpr size_t count() {  // without options
    if constexpr (sizeof...(A) == 0) {
      return 0;
    } else {
      return sizeof...(A) - is_options<std::tuple_element_t<sizeof...(A) - 1, std::tuple<A...>>>;
    }
  }
  template <typename... A>
  static constexpr bool fits = fit<std::tuple<A...>>(std::make_index_sequence<count<A...>()>());

 public:
  typename How::Mapped operator()(Given<P>... arguments) const {
    return map({std::move(arguments.value)...}, MapOptions<F>());
  }
  typename How::Mapped operator()(Given<P>... arguments, MapOptions<F> options) const {
    return map({std::move(arguments.value)...}, options);
  }
  typename How::Reduced operator()(Given<P>... arguments, MapReduceOptions<F, U> options) const {
    return How::run(start_parts<F>(options.partitioner({std::move(arguments.value)...}), options),
                    [reducer = std::move(options.reducer)](PartResults<rpc::result_of<F>>&& results) -> U {
                      return reducer(std::move(results));
                    });
  }
  template <typename... A>
  requires(!fits<A...>) void operator()(A&&...) const {
    static_assert(count<A...>() == sizeof...(P),
                  "the call has more or fewer arguments than the function. Options come last, in braces: "
                  "{.partitioner = …, .reducer = …, .timeout = …}");
    static_assert(count<A...>() != sizeof...(P), "an argument is not of its parameter's type, nor converts to it");
  }

 private:
  static typename How::Mapped map(std::tuple<P...>&& arguments, const MapOptions<F>& options) {
    return How::run(start_parts<F>(options.partitioner(std::move(arguments)), options),
                    [](PartResults<rpc::result_of<F>>&& results) -> MapResult<F> {
                      if constexpr (!std::is_void_v<MapResult<F>>) return std::move(results);
                    });
  }
};

}  // namespace muster::detail
