// Which ranks own which parameter: one on each host, which holds its gradient and its optimizer's state, and updates it.
//
// Thread-safety: all functions.
#pragma once

#include <cstddef>
#include <vector>

#include "parallel/same_module.h"

namespace muster::fsdp {

// The places, below `owners`, of the ranks that own `parameters`: each rank owns about the same number of bytes, of those
// that require gradients and of the others. Small parameters that are neighbours stay together, up to `group_bytes`.
std::vector<int> balanced_places(const std::vector<parallel::NamedTensor>& parameters, int owners, size_t group_bytes);

}  // namespace muster::fsdp
