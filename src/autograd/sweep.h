// When the dead entries of a table of weak pointers go: each time that it has doubled, so that a look at all of them
// costs nothing much for each that is added.
//
// Thread-safety: none of its own; guarded as the table is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace muster::autograd {

class Sweep {
 public:
  // Before one is added.
  template <typename Table, typename Dead>
  void operator()(Table& table, const Dead& dead) {
    if (table.size() < at_) return;
    std::erase_if(table, dead);
    at_ = std::max<size_t>(kLeast, 2 * table.size());
  }

 private:
  static constexpr size_t kLeast = 64;
  size_t at_ = kLeast;
};

}  // namespace muster::autograd
