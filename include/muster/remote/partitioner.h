// Partitioners split the arguments of a call into the parts that workers get.
//
//   dim_partitioner(1)                                        splits all tensors along dimension 1
//   batch_partitioner                                         = dim_partitioner(0); the default
//   exclusive_batch_partitioner                               one row per part
//   dim_partitioner(0, {.exclusive = true, .keepdim = false}) one row per part, without the dimension
//   dim_partitioner(0, {.exclusive = true, .balanced = true}) one row per part, to the worker that has time for it
//   3, "ps"                                                   no split: all arguments to that worker
//   every_worker                                              no split: all arguments to each worker
//   any_worker()                                              no split: to the workers in turn, a call to each
//   [](const at::Tensor& x) -> std::vector<muster::RemotePart<at::Tensor>> { … }
//                                                             your own, with the same arguments as the function
//
// dim_partitioner. All tensors of the arguments, also those in containers (comm/tensor_tree.h), must have the same size
// B in the dimension, which counts from the end if it is negative. All other arguments go to each part. With W workers:
//
//   .exclusive = false   B <= W: B parts of one row. B > W: W parts of B / W rows, rounded down; the last part gets the
//                        remaining rows too (10 rows, 4 workers: 2, 2, 2, 4).
//   .exclusive = true    B parts of one row; part i goes to worker i modulo W.
//   .keepdim = false     the row without the dimension (x[i]); only with .exclusive.
//   .workers             which workers, in which order; empty: all, by rank. May name one twice.
//   .balanced = true     with .exclusive: no part has a certain worker. Each worker has two unanswered parts, and gets
//                        the next one when it answers, so that slow workers get fewer.
//
// No rows: no parts. No tensor: one part, for this worker. An undefined tensor stays undefined. Parts are views through
// which gradients flow back to the whole.
//
// Errors: InvalidArgument, before anything is sent: two sizes (the message says of which arguments), a tensor without
// that dimension, keepdim = false or balanced without exclusive, a worker that does not exist. Aborted: RPC is not
// running.
// Thread-safety: values; calling a partitioner does not change it.
// Source: torchopt.distributed: TensorDimensionPartitioner, dim_partitioner, batch_partitioner.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "muster/remote/steady.h"
#include "muster/remote/whole.h"
#include "muster/remote/world_info.h"

namespace muster {

// The arguments of one remote call, and the worker that gets them.
template <typename... A>
struct RemotePart {
  WorkerId worker;
  std::tuple<A...> arguments;
};

struct DimOptions {
  bool exclusive = false;
  bool keepdim = true;
  std::vector<WorkerId> workers = {};
  bool balanced = false;
};

class DimPartitioner {
 public:
  explicit DimPartitioner(int64_t dim, DimOptions options = {});

  // Also for your own partitioners that build on this one.
  template <typename... A>
  std::vector<RemotePart<A...>> operator()(const A&... arguments) const;

  int64_t dim() const { return dim_; }
  const DimOptions& options() const { return options_; }

 private:
  int64_t dim_;
  DimOptions options_;
};

inline DimPartitioner dim_partitioner(int64_t dim = 0, DimOptions options = {}) {
  return DimPartitioner(dim, std::move(options));
}
inline const DimPartitioner batch_partitioner(0);
inline const DimPartitioner exclusive_batch_partitioner(0, {.exclusive = true});

struct EveryWorker {
  template <typename... A>
  std::vector<RemotePart<A...>> operator()(const A&... arguments) const;
};
inline constexpr EveryWorker every_worker;

namespace detail {

// One use of a DimPartitioner.
class DimSplit {
 public:
  explicit DimSplit(const DimPartitioner& how) : how_(how) {}
  void add(const at::Tensor& tensor, size_t argument);  // for every tensor, before plan()
  void plan();
  size_t parts() const { return parts_; }
  bool whole() const { return !rows_; }
  WorkerId worker(size_t part) const;
  at::Tensor cut(const at::Tensor& tensor, size_t part) const;

 private:
  const DimPartitioner& how_;
  std::optional<int64_t> rows_;
  size_t argument_ = 0;  // the argument that rows_ comes from
  size_t workers_ = 0, parts_ = 0;
};

}  // namespace detail

template <typename... A>
std::vector<RemotePart<A...>> DimPartitioner::operator()(const A&... arguments) const {
  using Arguments = std::tuple<A...>;
  detail::DimSplit split(*this);
  [&]<size_t... I>(Arguments all, std::index_sequence<I...>) {
    (detail::for_each_tensor(std::get<I>(all), [&](const at::Tensor& tensor) { split.add(tensor, I); }), ...);
  }
  (Arguments(arguments...), std::index_sequence_for<A...>());
  split.plan();
  std::vector<RemotePart<A...>> parts;
  parts.reserve(split.parts());
  for (size_t part = 0; part < split.parts(); ++part) {
    parts.push_back({split.worker(part), Arguments(arguments...)});
    if (!split.whole())
      detail::for_each_tensor(parts.back().arguments, [&](at::Tensor& tensor) { tensor = split.cut(tensor, part); });
  }
  return parts;
}

template <typename... A>
std::vector<RemotePart<A...>> EveryWorker::operator()(const A&... arguments) const {
  std::vector<RemotePart<A...>> parts;
  for (const rpc::WorkerInfo& worker : rpc::all_workers()) parts.push_back({worker, std::tuple<A...>(arguments...)});
  return parts;
}

// Any of the above, for a function with these arguments (a std::tuple).
template <typename Arguments>
class Partitioner;
template <typename... A>
class Partitioner<std::tuple<A...>> {
 public:
  using Parts = std::vector<RemotePart<A...>>;

  template <typename P>
  requires(!std::same_as<P, Partitioner>) Partitioner(P how) : how_(held(std::move(how))) {}

  Parts operator()(std::tuple<A...>&& arguments) const {
    if (const auto* const function = std::get_if<Function>(&*how_)) return std::apply(*function, arguments);
    Parts parts;
    parts.push_back({std::get<WorkerId>(*how_), std::move(arguments)});
    return parts;
  }

 private:
  using Function = std::function<Parts(const A&...)>;
  using How = std::variant<WorkerId, Function>;

  template <typename P>
  static How held(P how) {
    if constexpr (std::is_convertible_v<P, WorkerId>) {
      return WorkerId(std::move(how));
    } else if constexpr (std::is_invocable_r_v<Parts, const P&, const A&...>) {
      return Function(std::move(how));
    } else {
      static_assert(!sizeof(P),
                    "a partitioner is the number or name of a worker, dim_partitioner(…), every_worker, or a function "
                    "that takes the remote function's arguments by const& and returns a std::vector of RemotePart of "
                    "their types");
    }
  }

  detail::Steady<How> how_;
};

}  // namespace muster
