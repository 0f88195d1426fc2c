// Which causes of a warning are new. What others cause as often as they like must not fill the log.
//
// Thread-safety: an object belongs to one thread.
#pragma once

#include <cstddef>
#include <set>
#include <utility>

namespace muster {

template <typename Cause>
class FirstOfEach {
 public:
  explicit FirstOfEach(size_t most) : most_(most) {}

  // Whether `cause` is new. After `most` different causes, none is.
  bool operator()(Cause cause) { return known_.size() < most_ && known_.insert(std::move(cause)).second; }
  bool full() const { return known_.size() == most_; }

 private:
  const size_t most_;
  std::set<Cause> known_;
};

}  // namespace muster
