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

#include "parallel/same_module.h"

namespace muster::ddp {

class ParameterWatch {
 public:
  // `averaged`: of `all` the parameters of the module, those that it averages if they require grad.
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
  std::unordered_set<const void*> known_;
  uint64_t calls_ = 0;
};

}  // namespace muster::ddp
