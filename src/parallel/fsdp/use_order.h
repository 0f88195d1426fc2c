// Which units come and which go, where there is room for a few of them (gatherer.h, device_copies.h).
//
// Units of a list are there. Each has the fields `unit` and `operation`, the last one that used it. The least recently
// used one goes, but none that the same operation uses. Units that are expected to follow come ahead of time.
//
// Thread-safety: none.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace muster::fsdp {

// In which order units are used: a unit that followed two others the last time is expected to follow them again.
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

template <typename Units>
auto find_unit(Units& here, size_t unit) {
  return std::find_if(here.begin(), here.end(), [&](const auto& each) { return each.unit == unit; });
}

template <typename Units>
std::vector<size_t> sorted_units(const Units& here) {
  std::vector<size_t> units;
  for (const auto& each : here) units.push_back(each.unit);
  std::sort(units.begin(), units.end());
  return units;
}

// The least recently used unit that may go, in a list with the last used one first; here.end() if there is none.
template <typename Units, typename MayGo>
auto least_recently_used(Units& here, MayGo may_go) {
  for (auto it = here.end(); it != here.begin();)
    if (may_go(*--it)) return it;
  return here.end();
}

// Frees units, but none that the operation uses, until at most `most` are here. free(iterator) takes one off the list.
template <typename Units, typename Free>
void make_room(Units& here, size_t most, uint64_t operation, Free free) {
  while (here.size() > most) {
    const auto goes = least_recently_used(here, [&](const auto& each) { return each.operation != operation; });
    if (goes == here.end()) return;
    free(goes);
  }
}

// Lets the units come that UseOrder::expected() has returned, while there is room without them and without those that
// the operation uses. come(unit) puts one at the end of the list, and returns false if it cannot.
template <typename Units, typename Come, typename Free>
void fetch_ahead(Units& here, const std::vector<size_t>& expected, size_t most, uint64_t operation, Come come,
                 Free free) {
  const auto may_go = [&](const auto& each) {
    return each.operation != operation && std::find(expected.begin(), expected.end(), each.unit) == expected.end();
  };
  for (size_t i = 1; i < expected.size(); ++i) {
    if (find_unit(here, expected[i]) != here.end()) continue;
    if (here.size() >= most) {
      const auto goes = least_recently_used(here, may_go);
      if (goes == here.end()) return;
      free(goes);
    }
    if (!come(expected[i])) break;
  }
  make_room(here, most, operation, free);  // what an operation needed beyond it goes when that has ended
}

}  // namespace muster::fsdp
