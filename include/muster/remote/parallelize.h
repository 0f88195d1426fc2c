// Makes a parallel function object from a function, to be called like any other.
//
//   at::Tensor loss_of_part(optim::ModuleState model, at::Tensor batch);
//   const auto loss = muster::parallelize<&loss_of_part>();   // splits by rows, and averages
//   …
//   at::Tensor value = loss(model, batch);
//
//   const auto inner_loop = muster::parallelize<&one_task>(
//       {.partitioner = dim_partitioner(0, {.exclusive = true, .keepdim = false}), .reducer = mean_reducer});
//
//   parallelize<&f>()                                   batch_partitioner, mean_reducer (f returns nothing: no reducer)
//   parallelize<&f>({.partitioner = …})                 a std::vector of the results
//   parallelize<&f>({.partitioner = …, .reducer = …})   the reducer's result; parallelize<&f, U>, if it is not f's type
//
// Each form takes .timeout = … and .max_retries = … as its last options.
//
// Returns a function object: calling it calls remote_sync_call<&f> with these options; the function object of
// parallelize_async() calls remote_async_call<&f>. It may be made before there is a World, as a global for example.
//
// Errors: as remote_call.h; InvalidArgument for options that contradict each other, when the object is made.
// Thread-safety: several threads may call the object concurrently.
// Source: torchopt.distributed: parallelize, parallelize_async, parallelize_sync.
#pragma once

#include <chrono>
#include <optional>
#include <type_traits>
#include <utility>

#include "muster/remote/remote_call.h"

namespace muster {

// ParallelOptions has neither partitioner nor reducer, ParallelMapOptions only a partitioner. (MapReduceOptions has a
// reducer.)
struct ParallelOptions {
  std::optional<std::chrono::milliseconds> timeout = {};
  int max_retries = 0;
};
template <auto F>
struct ParallelMapOptions {
  PartitionerOf<F> partitioner;
  std::optional<std::chrono::milliseconds> timeout = {};
  int max_retries = 0;
};

namespace detail {

template <typename How, auto F, typename U, typename Options>
class Parallel {
 public:
  explicit Parallel(Options options) : options_(std::move(options)) {}
  template <typename... A>
  auto operator()(A&&... arguments) const {
    return RemoteCall<How, F, U>()(std::forward<A>(arguments)..., options_);
  }

 private:
  Options options_;
};

template <template <auto, typename> typename Way, auto F, typename U>
class Parallelize {
  template <typename Options>
  using With = Parallel<Way<F, U>, F, U, Options>;
  static constexpr bool kVoid = std::is_void_v<rpc::result_of<F>>;
  using Default = std::conditional_t<kVoid, MapOptions<F>, MapReduceOptions<F, U>>;

 public:
  With<Default> operator()(ParallelOptions options = {}) const {
    if constexpr (kVoid) {
      return With<Default>({.timeout = options.timeout, .max_retries = options.max_retries});
    } else {
      return With<Default>({.reducer = mean_reducer, .timeout = options.timeout, .max_retries = options.max_retries});
    }
  }
  With<MapOptions<F>> operator()(ParallelMapOptions<F> options) const {
    return With<MapOptions<F>>({.partitioner = std::move(options.partitioner),
                                .timeout = options.timeout,
                                .max_retries = options.max_retries});
  }
  With<MapReduceOptions<F, U>> operator()(MapReduceOptions<F, U> options) const {
    return With<MapReduceOptions<F, U>>(std::move(options));
  }
};

}  // namespace detail

template <auto F, typename U = rpc::result_of<F>>
inline constexpr detail::Parallelize<detail::SyncCall, F, U> parallelize{};
template <auto F, typename U = rpc::result_of<F>>
inline constexpr detail::Parallelize<detail::SyncCall, F, U> parallelize_sync{};
template <auto F, typename U = rpc::result_of<F>>
inline constexpr detail::Parallelize<detail::AsyncCall, F, U> parallelize_async{};

}  // namespace muster
