// The copies that operators compute with in mixed precision (muster/parallel/mixed_precision.h), instead of parameters.
//
// A parameter has a `Sharing` (shared_tensor.h) whose `instead` gives out views of its copy, and is watched
// (watched.h). Each operator that reads the parameter gets a view of its own. For autograd the view is computed from
// the parameter, by a conversion: so the parameter is the leaf, and its gradient has the parameter's dtype.
//
// Thread-safety: all functions.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <vector>

#include "muster/parallel/mixed_precision.h"
#include "parallel/same_module.h"

namespace muster::parallel {

// `copy` has the strides of the memory of `parameter`. The view shares the version of `parameter`: if that is updated,
// a backward() over an older graph throws. InvalidArgument if there is a forward-mode derivative.
at::Tensor view_of_copy(const at::Tensor& parameter, const at::Tensor& copy);

// InvalidArgument if a dtype cannot be used.
void check(const MixedPrecision& precision);
// The dtype in which forward() and backward() use each parameter.
std::vector<at::ScalarType> compute_dtypes(const torch::nn::Module& module, const std::vector<NamedTensor>& parameters,
                                           const MixedPrecision& precision);
// To buffer_dtype, for good.
void convert_buffers(const torch::nn::Module& module, const MixedPrecision& precision);
// For require_same_on_all_ranks().
std::string words_of(const torch::nn::Module& module, const MixedPrecision& precision,
                     const std::vector<at::ScalarType>& compute_dtypes);

}  // namespace muster::parallel
