// Which rank owns which parameter: the rank that holds its gradient and its optimizer's state, and updates it.
//
// Thread-safety: all functions.
#pragma once

#include <cstddef>
#include <vector>

#include "parallel/same_module.h"

namespace muster::fsdp {

// The owners of `parameters` in a group of `ranks` ranks: each rank owns about the same number of bytes, of those that
// require gradients and of the others. Small parameters that are neighbours stay together, up to `group_bytes`.
std::vector<int> balanced_owners(const std::vector<parallel::NamedTensor>& parameters, int ranks, size_t group_bytes);

}  // namespace muster::fsdp
