// Large parameters in parts, each of some rows, so that ranks can own parts of a parameter.
//
// Thread-safety: all functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/modules/same_module.h"

namespace muster::fsdp {

// Rows: along the dimension that is the outermost in memory. So a part is one range of memory.
struct RowPart {
  size_t parameter = 0;  // index
  std::string name;      // "embedding.weight[0:5000]"
  int64_t dim = 0, begin = 0, count = 0;
  int64_t offset = 0, elements = 0;  // in the parameter's memory

  at::Tensor of(const at::Tensor& parameter_like) const { return parameter_like.narrow(dim, begin, count); }
};

// Parameters of more than `bytes` that are trained, in parts of about the same size, of at most `bytes` if a row is not
// larger. How they are divided depends on the parameters only. None of a parameter with fewer than two rows.
std::vector<RowPart> divide_rows(const std::vector<parallel::NamedTensor>& parameters, size_t bytes);

}  // namespace muster::fsdp
