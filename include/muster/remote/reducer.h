// Reducers combine the results of the parts into one.
//
//   mean_reducer, sum_reducer       element by element: tensors of one shape and dtype, floating-point numbers (sums:
//                                   integers too), and pairs, tuples, arrays, vectors, maps, optionals and structs
//                                   with tree() of these (comm/tensor_tree.h), which must be alike in all parts
//   [](std::vector<R> results) { return …; }
//                                   your own: R is the function's result type; results are in the order of the parts
//
// The mean is that of the parts: if they have different numbers of rows, it differs from the mean of the rows. Tensors
// are stacked and reduced along the new dimension, so gradients flow to each part's result.
//
// Errors: InvalidArgument: no results (a batch without rows), results that are not alike (the message says which part),
// the mean of integer tensors. Thread-safety: no shared state. Source: torchopt.distributed: mean_reducer,
// sum_reducer.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/comm/tensor_tree.h"
#include "muster/remote/steady.h"
#include "muster/rpc/future.h"

namespace muster {
namespace detail {

enum class Combine { kSum, kMean };

at::Tensor combine_tensors(const std::vector<at::Tensor>& results, Combine how);
void require_results(size_t count);
// Throws InvalidArgument: part `part` differs from part 0 in `what`.
[[noreturn]] void results_differ(size_t part, std::string_view what);

template <Combine kHow, typename T>
T combine(std::vector<T> results);

// Combines the same member of all results.
template <Combine kHow, typename T, typename Member>
auto combine_member(std::vector<T>& results, Member&& member) {
  std::vector<std::remove_cvref_t<decltype(member(results[0]))>> members;
  members.reserve(results.size());
  for (T& result : results) members.push_back(member(result));
  return combine<kHow>(std::move(members));
}

template <Combine kHow, typename T>
T combine(std::vector<T> results) {
  if constexpr (std::same_as<T, at::Tensor>) {
    return combine_tensors(results, kHow);
  } else if constexpr (std::is_arithmetic_v<T> && !std::same_as<T, bool> &&
                       (kHow == Combine::kSum || std::floating_point<T>)) {
    T sum{};
    for (const T result : results) sum = static_cast<T>(sum + result);
    return kHow == Combine::kMean ? static_cast<T>(sum / static_cast<T>(results.size())) : sum;
  } else if constexpr (is_sequence<T>) {
    for (size_t part = 0; part < results.size(); ++part)
      if (results[part].size() != results[0].size()) results_differ(part, "the number of elements");
    T combined = results[0];
    std::vector<typename T::iterator> at;
    for (T& result : results) at.push_back(result.begin());
    for (auto& element : combined)
      element = combine_member<kHow>(at, [](auto& iterator) -> typename T::value_type { return *iterator++; });
    return combined;
  } else if constexpr (is_map<T>) {
    T combined = results[0];
    for (size_t part = 0; part < results.size(); ++part)
      if (results[part].size() != results[0].size()) results_differ(part, "the number of keys");
    for (auto& [key, element] : combined) {
      for (size_t part = 0; part < results.size(); ++part)
        if (!results[part].contains(key)) results_differ(part, "the keys");
      element =
          combine_member<kHow>(results, [&k = key](T& result) -> typename T::mapped_type { return result.at(k); });
    }
    return combined;
  } else if constexpr (is_box<T>) {
    for (size_t part = 0; part < results.size(); ++part)
      if (!results[part] != !results[0]) results_differ(part, "whether there is a value");
    if (!results[0]) return {};
    auto inner = combine_member<kHow>(results, [](T& result) { return *result; });
    if constexpr (is_shared<T>) {
      return std::make_shared<decltype(inner)>(std::move(inner));
    } else {
      return inner;
    }
  } else if constexpr (is_tuple<T>) {
    return [&]<size_t... I>(std::index_sequence<I...>)->T {
      return {combine_member<kHow>(results, [](T& result) { return std::get<I>(result); })...};
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (HasTree<T>) {
    T combined = results[0];
    [&]<size_t... I>(auto members, std::index_sequence<I...>) {
      ((std::get<I>(members) =
            combine_member<kHow>(results,
                                 [](T& result) -> std::remove_cvref_t<decltype(std::get<I>(members))> {
                                   return std::get<I>(result.tree());
                                 })),
       ...);
    }
    (combined.tree(), std::make_index_sequence<std::tuple_size_v<decltype(combined.tree())>>());
    return combined;
  } else {
    static_assert(!sizeof(T),
                  "mean_reducer and sum_reducer take tensors, numbers (the mean: not of integers) and containers or "
                  "structs with tree() of these. Give a reducer of your own: {.reducer = [](std::vector<R> results) { "
                  "return …; }}; or a struct the member  auto tree() { return std::tie(its, members); }");
  }
}

template <Combine kHow>
struct Combiner {
  template <typename R>
  R operator()(std::vector<R> results) const {
    require_results(results.size());
    return combine<kHow>(std::move(results));
  }
};

}  // namespace detail

inline constexpr detail::Combiner<detail::Combine::kMean> mean_reducer;
inline constexpr detail::Combiner<detail::Combine::kSum> sum_reducer;

// The results of the parts of a call, for a function that returns R; if R is void, one std::monostate per part.
template <typename R>
using PartResults = std::vector<rpc::detail::NotVoid<R>>;

// Any of the reducers above, from results R to a U.
template <typename R, typename U>
class Reducer {
 public:
  template <typename F>
  requires(!std::same_as<F, Reducer>) Reducer(F how) : how_(held(std::move(how))) {}
  U operator()(PartResults<R>&& results) const { return (*how_)(std::move(results)); }

 private:
  using Function = std::function<U(PartResults<R>&&)>;

  template <typename F>
  static Function held(F how) {
    if constexpr (std::is_invocable_r_v<U, const F&, PartResults<R>>) {
      return how;
    } else {
      static_assert(!sizeof(F),
                    "a reducer takes a std::vector of what the function returns. One that gives another type than the "
                    "function does is named with it: remote_sync_call<&function, Type>(…)");
    }
  }

  detail::Steady<Function> how_;
};

}  // namespace muster
