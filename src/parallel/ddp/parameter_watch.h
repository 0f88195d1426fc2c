// Finds parameters that have changed since the DistributedDataParallel was made. Their gradients would not be averaged,
// or not fit.
//
// Thread-safety: one thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "parallel/modules/same_module.h"

namespace muster::ddp {

class ParameterWatch {
 public:
  // `all`: the module's parameters. `averaged`: those that are not ignored. Made when the parameters are as training
  // will have them.
  ParameterWatch(const std::vector<parallel::NamedTensor>& all, const std::vector<parallel::NamedTensor>& averaged);

  // Before a forward() in training. Throws InvalidArgument, which names the parameter, if one that did not require grad
  // does now, or if one has another shape, dtype or device. The first few calls, and then every 16th, also look for
  // parameters that the module did not have.
  void check(const torch::nn::Module& module);

 private:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    at::Device device;
    bool requires_grad;
  };
  std::vector<Parameter> averaged_;
  std::vector<at::Tensor> all_;  // so that no other tensor gets the address of one of them
  std::unordered_set<const void*> known_;
  std::unordered_set<std::string> ignored_;
  uint64_t calls_ = 0;
};

}  // namespace muster::ddp
