// Functions that run on some workers only, and do nothing on the others.
//
//   const auto save = muster::rank_zero_only([](const Net& net, const std::string& path) { … });
//   save(net, "net.pt");                                            // on every worker; only worker 0 writes
//   std::optional<double> loss = muster::rank_zero_only(&train)(config);
//   if (muster::on_rank({0, 2}, [] { … })()) …                      // true where it ran
//
// A call returns a std::optional of the function's result, empty on a worker where the function did not run; for a
// function that returns nothing, it returns whether the function ran. Results by reference are copied.
//
// The rank is looked up at each call, so a wrapper may be made before there is a World. Ranks outside the job are
// ignored. No worker waits for another.
//
// Errors: what the function throws; Aborted if the thread has no World. Thread-safety: that of the function.
// Source: torchopt.distributed: on_rank, not_on_rank, rank_zero_only, rank_non_zero_only, rank_all.
#pragma once

#include <algorithm>
#include <concepts>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/remote/world_info.h"

namespace muster {

template <typename F>
class OnRanks {
 public:
  OnRanks(std::vector<int> ranks, bool there, F function)
      : ranks_(std::move(ranks)), there_(there), function_(std::move(function)) {}

  template <typename... A>
  requires std::invocable<const F&, A...>
  auto operator()(A&&... arguments) const {
    using R = std::invoke_result_t<const F&, A...>;
    const bool runs = (std::find(ranks_.begin(), ranks_.end(), get_rank()) != ranks_.end()) == there_;
    if constexpr (std::is_void_v<R>) {
      if (runs) std::invoke(function_, std::forward<A>(arguments)...);
      return runs;
    } else {
      std::optional<std::remove_cvref_t<R>> result;
      if (runs) result.emplace(std::invoke(function_, std::forward<A>(arguments)...));
      return result;
    }
  }

 private:
  std::vector<int> ranks_;
  bool there_;  // true: runs on ranks_; false: runs on all others
  F function_;
};

template <typename F>
OnRanks<std::decay_t<F>> on_rank(std::vector<int> ranks, F&& function) {
  return {std::move(ranks), true, std::forward<F>(function)};
}
template <typename F>
OnRanks<std::decay_t<F>> not_on_rank(std::vector<int> ranks, F&& function) {
  return {std::move(ranks), false, std::forward<F>(function)};
}
template <typename F>
OnRanks<std::decay_t<F>> rank_zero_only(F&& function) {
  return on_rank({0}, std::forward<F>(function));
}
template <typename F>
OnRanks<std::decay_t<F>> rank_non_zero_only(F&& function) {
  return not_on_rank({0}, std::forward<F>(function));
}
template <typename F>
OnRanks<std::decay_t<F>> rank_all(F&& function) {
  return not_on_rank({}, std::forward<F>(function));
}

}  // namespace muster
