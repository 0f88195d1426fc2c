#include "comm/stragglers.h"

#include <algorithm>
#include <cstdio>

#include "base/text.h"

namespace muster::comm {

std::vector<Straggler> Stragglers::by_rank() const {
  std::vector<Straggler> list;
  for (size_t r = 0; r < ranks_.size(); ++r)
    list.push_back({.rank = static_cast<int>(r),
                    .times_last = ranks_[r].times_last.load(std::memory_order_relaxed),
                    .late = cycle_.of(ranks_[r].late.load(std::memory_order_relaxed))});
  return list;
}

std::string Stragglers::verdict(const std::string& group, std::chrono::nanoseconds at_least) const {
  const auto ranks = by_rank();
  const auto worst =
      std::max_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) { return a.late < b.late; });
  const auto seconds = [](auto time) { return std::chrono::duration<double>(time).count(); };
  const double all = static_cast<double>(operations()), time = seconds(Clock::now() - began_);
  if (ranks.size() < 2 || all == 0 || static_cast<double>(worst->times_last) < all * 2 / 3 || worst->late < at_least ||
      seconds(worst->late) < time / 20)
    return {};
  char words[256];
  std::snprintf(
      words, sizeof words,
      "rank %d came last to %.0f %% of %.0f collectives of group '%s'; the others waited %.3f s for it, %.0f %% "
      "of the time",
      worst->rank, 100 * static_cast<double>(worst->times_last) / all, all, group.substr(0, 64).c_str(),
      seconds(worst->late), 100 * seconds(worst->late) / time);
  return words;
}

}  // namespace muster::comm
