// Large parameters in parts, each of some rows, so that ranks can own parts of a parameter.
//
// Thread-safety: all functions.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "parallel/kit/buckets.h"
#include "parallel/modules/same_module.h"

namespace muster::fsdp {

struct RowPart {
  size_t parameter = 0;  // index
  std::string name;      // "embedding.weight[0:5000]"
  parallel::RowRange range;
};

// Parameters of more than `bytes` that are trained, in parts of about the same size, of at most `bytes` if a row is not
// larger. How they are divided depends on the parameters only. None of a parameter with fewer than two rows.
std::vector<RowPart> divide_rows(const std::vector<parallel::NamedTensor>& parameters, size_t bytes);

}  // namespace muster::fsdp
