// Removes the dead entries of a table of weak pointers each time that the table has doubled, so that looking at all
// entries costs little for each one that is added.
//
// Thread-safety: none; protect it like the table.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace muster::autograd {

class Sweep {
 public:
  // To be called before an entry is added.
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
