#include "comm/core/stragglers.h"

#include <algorithm>
#include <cstdio>

#include "base/text.h"

namespace muster::comm {

Stragglers::Stragglers(int ranks, Unit unit, std::span<Word> memory)
    : ranks_(ranks),
      unit_(unit),
      own_(memory.empty() ? words(ranks) : 0),
      words_(memory.empty() ? std::span<Word>(own_) : memory) {}

std::vector<Straggler> Stragglers::by_rank() const {
  std::vector<Straggler> list;
  for (int r = 0; r < ranks_; ++r) {
    const size_t at = 1 + 2 * static_cast<size_t>(r);
    list.push_back({.rank = r,
                    .times_last = words_[at].load(std::memory_order_relaxed),
                    .late = time(words_[at + 1].load(std::memory_order_relaxed))});
  }
  return list;
}

std::string Stragglers::report(const std::string& group, std::chrono::nanoseconds at_least,
                               const std::function<std::string(int)>& name) const {
  const auto ranks = by_rank();
  const auto worst =
      std::max_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) { return a.late < b.late; });
  const auto seconds = [](auto time) { return std::chrono::duration<double>(time).count(); };
  const double all = static_cast<double>(operations()), time = seconds(Clock::now() - began_);
  if (ranks.size() < 2 || all == 0 || static_cast<double>(worst->times_last) < all * 2 / 3 || worst->late < at_least ||
      seconds(worst->late) < time / 20)
    return {};
  char words[256];
  std::snprintf(words, sizeof words,
                " came last to %.0f %% of %.0f collectives of group '%s'; the others waited %.3f s for it, %.0f %% "
                "of the time",
                100 * static_cast<double>(worst->times_last) / all, all, group.substr(0, 64).c_str(),
                seconds(worst->late), 100 * seconds(worst->late) / time);
  return (name ? name(worst->rank) : text("rank ", worst->rank)) + words;
}

}  // namespace muster::comm
