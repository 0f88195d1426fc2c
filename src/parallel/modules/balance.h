// Who gets which parameters, if all are to get as much.
//
// Thread-safety: a Balance is its thread's.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "parallel/modules/same_module.h"

namespace muster::parallel {

// Divides parameters among owners, so that each has about the same number of bytes: of those that require gradients,
// and of the others.
class Balance {
 public:
  explicit Balance(int owners);
  // Takes some more parameters; returns the owner of each, a number below `owners`. Small parameters that are
  // neighbours stay together, up to `group_bytes`.
  std::vector<int> divide(const std::vector<NamedTensor>& parameters, size_t group_bytes);

 private:
  std::array<std::vector<size_t>, 2> bytes_;  // by owner; of parameters without and with gradients
};

}  // namespace muster::parallel
