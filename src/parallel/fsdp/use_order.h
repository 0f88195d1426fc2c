// In which order units are used: a unit that followed two others the last time is expected to follow them again.
//
// Thread-safety: none.
#pragma once

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

namespace muster::fsdp {

class UseOrder {
 public:
  void used(size_t unit) {
    if (last_.second == unit) return;
    followed_by_[last_] = unit;
    last_ = {last_.second, unit};
  }
  // A step begins, or has ended.
  void restart() { last_ = {kNone, kNone}; }
  // The unit that was used last, and those that will follow; at most so many.
  std::vector<size_t> expected(size_t most) const {
    std::vector<size_t> units{last_.second};
    for (auto last = last_; units.size() < most;) {
      const auto next = followed_by_.find(last);
      if (next == followed_by_.end()) break;
      units.push_back(next->second);
      last = {last.second, next->second};
    }
    return units;
  }

 private:
  static constexpr size_t kNone = ~size_t{0};
  std::pair<size_t, size_t> last_{kNone, kNone};             // the last two units that were used
  std::map<std::pair<size_t, size_t>, size_t> followed_by_;  // what was used after such two
};

// The least recently used of units that may go, in a list with the last used one first; units.end() if there is none.
template <typename Units, typename MayGo>
auto least_recently_used(Units& units, MayGo may_go) {
  for (auto it = units.end(); it != units.begin();)
    if (may_go(*--it)) return it;
  return units.end();
}

}  // namespace muster::fsdp
