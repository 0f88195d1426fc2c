// Which rank keeps an optimizer's states of a parameter: any, or the one that owns the parameter
// (FullyShardedDataParallel, ZeroRedundancyOptimizer).
//
// Thread-safety: none; the thread of the optimizer.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <optional>
#include <string>
#include <typeinfo>

namespace muster::parallel {

struct StateOwner {
  std::string name;           // the parameter's, if it is known
  int rank = 0;               // of the World; if each host has an owner, the one on this host
  bool is_this_rank = false;  // whether it is this rank
  int first = 0;              // if each host has an owner: that on the first host
  bool is_only = true;        // no other host has one
};
// None if every rank keeps the states.
std::optional<StateOwner> state_owner(torch::optim::Optimizer& optimizer, const at::Tensor& parameter);
bool keeps_state(torch::optim::Optimizer& optimizer, const at::Tensor& parameter);  // this rank

// The class whose states and options the optimizer has: that of a ZeroRedundancyOptimizer is the one that it is derived
// from.
const std::type_info& class_of(const torch::optim::Optimizer& optimizer);

}  // namespace muster::parallel
