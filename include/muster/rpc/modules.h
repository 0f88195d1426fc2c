// Modules and optimizers as arguments of calls: their state, as named tensors.
//
//   at::Tensor evaluate(rpc::ModuleState state, at::Tensor x) {
//     Net net;
//     rpc::load(net, state);
//     return net.forward(x);
//   }
//   rpc::sync<&evaluate>("worker1", rpc::state_of(*net), x);
//
// load() copies below autograd, so no gradient passes from the loaded module to the state: backward() of a result would
// leave the sender's parameters without one. To train through a call, take the module itself as an object (rref.h), or
// use optim::extract_state_dict() and recover_state_dict() (muster/optim/meta.h), or return the gradients.
//
// The tensors of a state are the module's or optimizer's own, not copies, until the state is sent. This is a separate
// header because libtorch's modules take seconds to compile.
//
// Errors: load() throws Mismatch, before it changes anything, and names the tensors that are missing, left over or of
// another shape. Thread-safety: that of the module.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "muster/rpc/serialize.h"

namespace muster::rpc {

// Parameters and buffers by their dotted names, in the module's order. Undefined buffers stay undefined.
struct ModuleState {
  std::vector<std::pair<std::string, at::Tensor>> parameters, buffers;
  bool training = true;
  MSGPACK_DEFINE(parameters, buffers, training);
};

// What an optimizer has learned about its parameters, as named tensors and numbers: "3/exp_avg" belongs to its
// parameter 3, counted from 0 over all groups. `archive` has its options, as libtorch saves them. That is true of
// torch's SGD, Adam, AdamW, RMSprop and Adagrad and of those in muster/optim/optimizers.h; of all others the archive
// has everything.
struct OptimizerState {
  std::string archive;
  std::vector<std::pair<std::string, at::Tensor>> tensors = {};
  std::vector<std::pair<std::string, int64_t>> numbers = {};
  MSGPACK_DEFINE(archive, tensors, numbers);
};

ModuleState state_of(const torch::nn::Module& module);
void load(torch::nn::Module& module, const ModuleState& state);  // copies into the module's tensors

OptimizerState state_of(const torch::optim::Optimizer& optimizer);
void load(torch::optim::Optimizer& optimizer, const OptimizerState& state);

}  // namespace muster::rpc
