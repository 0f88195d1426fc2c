// Map and reduce over workers: a function is called once for each part of its arguments, and the results are combined.
//
//   at::Tensor loss(optim::ModuleState model, at::Tensor batch);     // optim/meta.h: gradients pass through it
//
//   auto losses = muster::remote_sync_call<&loss>(model, batch);                       // std::vector, one per part
//   auto mean = muster::remote_sync_call<&loss>(model, batch, {.reducer = mean_reducer});
//   auto one = muster::remote_sync_call<&loss>(model, batch, {.partitioner = "worker1"})[0];
//   auto tasks = muster::remote_async_call<&inner_loop>(                               // rpc::Future
//       model, batch, {.partitioner = dim_partitioner(0, {.exclusive = true, .keepdim = false}),
//                      .reducer = mean_reducer, .timeout = 5s});
//   double worst = muster::remote_sync_call<&loss, double>(                            // not the result type of loss()
//       model, batch, {.reducer = [](std::vector<at::Tensor> all) { return at::stack(all).max().item<double>(); }});
//
// The options come last, in braces, in this order; all are optional:
//   .partitioner   how to split the arguments, or which workers get all of them (partitioner.h); default:
//                  batch_partitioner
//   .reducer       how to combine the results (reducer.h); without one, the call returns a std::vector of them, in the
//                  order of the parts (nothing, if the function returns nothing)
//   .timeout       of each part's call; default: rpc::Options::timeout
//   .max_retries   how often a part is called again, on another worker, because its worker was lost; default: 0
//
// Arguments are converted to the types of the function's parameters, as in rpc::async, and these must be copyable. The
// function is any that rpc::async takes, a coroutine or lambda too. Parts of one worker run concurrently. Each part is
// its own rpc::async<&f>, made in the caller's thread and in the order of the parts (parts for any_worker() that wait
// for a worker: in a thread of the agent): what holds for remote calls (gradients, push-back, tensors by reference)
// holds for each part.
//
// The first part that fails ends the call: the other parts are cancelled, and the call throws that part's error, of the
// same kind (RemoteError, PeerLost, TimeoutError), with "[part 2 of 4]" (from 0) added if there are several;
// RemoteError::worker() and the text name the worker. Cancelling the future of an asynchronous call cancels all parts.
//
// With .max_retries the function must depend on nothing but its arguments. The loss of a worker is then no error,
// neither before the part has answered nor before its backward has: the part is called again on a living worker (one
// of any_worker()'s, if it was for any; else one that the call's parts name; or any if none of these lives; the one
// with the fewest parts to do), and its graph continues there. The results and gradients are the same as without a
// loss. Other errors end the call as ever, as does a loss after so many retries. The arguments are kept until the graph
// is used up. What the first worker's handler called or changed elsewhere stays; gradients of gradients (create_graph)
// of a part are lost with its worker.
//
// With .max_retries, or if parts wait for any_worker(), tensors of the arguments are read later than the call is made.
// Do not change them in place before the results are there, or with .max_retries before backward(): a part that would
// be sent with others than it was made with throws InvalidArgument instead.
//
// A reducer of a synchronous call runs in the caller's thread; that of an asynchronous call runs where the agent runs
// continuations, or in the caller's thread if all parts have been answered by then, with the caller's grad mode and the
// rest of at::ThreadLocalState. So hold no mutex during the call that the reducer takes.
//
// In a co_await expression GCC 12 destroys twice what closures with captures, and braces within braces, hold: give the
// call a name before you await it, unless its options are as simple as {.partitioner = "ps", .reducer = mean_reducer}.
//
// Errors: the call itself throws those of the partitioner and of rpc::async (parts that were sent already are
// cancelled); sync and get() throw those of the parts and of the reducer. Thread-safety: as rpc::async.
// Source: torchopt.distributed: remote_sync_call, remote_async_call.
#pragma once

#include <chrono>
#include <concepts>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/remote/partitioner.h"
#include "muster/remote/reducer.h"
#include "muster/rpc/call.h"

namespace muster {

template <auto F>
using PartitionerOf = Partitioner<rpc::arguments_of<F>>;

// Options without a reducer, and with a reducer that returns a U.
template <auto F>
struct MapOptions {
  PartitionerOf<F> partitioner = batch_partitioner;
  std::optional<std::chrono::milliseconds> timeout = {};
  int max_retries = 0;
};
template <auto F, typename U = rpc::result_of<F>>
struct MapReduceOptions {
  PartitionerOf<F> partitioner = batch_partitioner;
  Reducer<rpc::result_of<F>, U> reducer;
  std::optional<std::chrono::milliseconds> timeout = {};
  int max_retries = 0;
};

// The result of a call without a reducer.
template <auto F>
using MapResult = std::conditional_t<std::is_void_v<rpc::result_of<F>>, void, PartResults<rpc::result_of<F>>>;

namespace detail {
template <auto F, typename U>
struct SyncCall;
template <auto F, typename U>
struct AsyncCall;
template <typename How, auto F, typename U, typename Arguments = rpc::arguments_of<F>>
class RemoteCall;
}  // namespace detail

// Returns MapResult<F>, or U if there is a reducer.
template <auto F, typename U = rpc::result_of<F>>
inline constexpr detail::RemoteCall<detail::SyncCall<F, U>, F, U> remote_sync_call{};
// Returns the Future of MapResult<F> or U.
template <auto F, typename U = rpc::result_of<F>>
inline constexpr detail::RemoteCall<detail::AsyncCall<F, U>, F, U> remote_async_call{};

}  // namespace muster

#include "muster/remote/remote_call_impl.h"  // IWYU pragma: export
