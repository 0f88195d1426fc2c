// Units: the parameters that are gathered together, where a host does not have all parameters all the time.
//
// Thread-safety: all functions.
#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "parallel/modules/same_module.h"

namespace muster::fsdp {

using Unit = std::vector<size_t>;  // indices of parameters

// The parameters of a module for which `is_unit` is true are a unit, without those of such a module inside of it. The
// others are divided in their order, into units of at most `bytes` or of one parameter; but a small parameter stays
// with a large one before it in the same module. is_unit may be null.
std::vector<Unit> make_units(const torch::nn::Module& module, const std::vector<parallel::NamedTensor>& parameters,
                             size_t bytes, const std::function<bool(const torch::nn::Module&)>& is_unit);

}  // namespace muster::fsdp
