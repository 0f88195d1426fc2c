#include "muster/data/even_batches.h"

#include <ATen/ops/full.h>

#include "muster/base/error.h"

namespace muster::data {

void check_even_batches(const EvenBatchesOptions& options) {
  if (options.every == 0) throw InvalidArgument("even_batches: every: expected 1 or more, got 0");
}

size_t least_of_all(size_t count, const EvenBatchesOptions& options) {
  const auto least = at::full({1}, static_cast<int64_t>(count), at::TensorOptions().dtype(at::kLong));
  all_reduce(least, {.op = ReduceOp::MIN, .group = options.group, .timeout = options.timeout});
  return static_cast<size_t>(*least.const_data_ptr<int64_t>());
}

}  // namespace muster::data
