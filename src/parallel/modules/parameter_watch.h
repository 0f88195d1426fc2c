// Finds parameters that have changed since a DistributedDataParallel or a FullyShardedDataParallel was made. Their
// gradients would not be averaged, or not fit.
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

namespace muster::parallel {

class ParameterWatch {
 public:
  // `user`: the class, for errors. `all`: the module's parameters. `averaged`: those that are not ignored. Made when the
  // parameters are as training will have them.
  ParameterWatch(const char* user, const std::vector<NamedTensor>& all, const std::vector<NamedTensor>& averaged);

  // Both are for before a forward() in training, and throw InvalidArgument, which names the parameter: if one that did
  // not require grad does now, or if one has another shape, dtype or device.
  void check_averaged() const;
  // If there are parameters that the module did not have. The first few calls look, and then every 16th.
  void check_for_new(const torch::nn::Module& module);

 private:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    at::Device device;
    bool requires_grad;
  };
  std::string advice() const;

  const std::string user_;
  std::vector<Parameter> averaged_;
  std::vector<at::Tensor> all_;  // so that no other tensor gets the address of one of them
  std::unordered_set<const void*> known_;
  std::unordered_set<std::string> ignored_;
  uint64_t calls_ = 0;
};

}  // namespace muster::parallel
