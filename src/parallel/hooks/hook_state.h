// What the states of communication hooks have in common.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <map>
#include <string>

#include "muster/parallel/comm_hook.h"

namespace muster::comm_hooks {

using StateTensors = std::map<std::string, at::Tensor>;

// Counts the iterations: each ends with the last bucket.
inline void count(int64_t& iter, const GradBucket& bucket) { iter += bucket.is_last() ? 1 : 0; }

void save(torch::serialize::OutputArchive& archive, const std::string& key, const StateTensors& tensors);
StateTensors load(torch::serialize::InputArchive& archive, const std::string& key);
void save(torch::serialize::OutputArchive& archive, int64_t iter);
int64_t load_iter(torch::serialize::InputArchive& archive);

}  // namespace muster::comm_hooks
