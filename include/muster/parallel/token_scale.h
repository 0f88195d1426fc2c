// A loss that is a mean over tokens, where ranks have unequal numbers of them.
//
// DistributedDataParallel averages gradients over ranks. If each rank's loss is the mean over its own tokens, a token
// of a rank with few of them counts more than one of a rank with many, and the training changes with the number of
// ranks and of accumulated batches. So let each rank take the sum over its tokens, and scale it:
//
//   const double scale = muster::token_scale(tokens);    // of all batches up to the next step()
//   for (auto& batch : batches) {                        // all but the last under no_sync()
//     auto sum = cross_entropy(model(batch.input), batch.target, CrossEntropyFuncOptions().reduction(torch::kSum));
//     (sum * scale).backward();
//   }
//
// Then the gradients are those of the mean over the tokens of all ranks and batches, as if one process had all.
// Samples, or weights of samples, can be counted in the same way.
//
// The group must be the one over which gradients are averaged.
//
// Thread-safety: as collectives.h.
#pragma once

#include <ATen/ops/empty.h>

#include <cmath>
#include <string>

#include "muster/base/error.h"
#include "muster/comm/collectives.h"

namespace muster {

// Collective: the number of ranks, divided by the tokens of all ranks. `tokens`: this rank's, 0 or more. If no rank has
// any, returns 0: then a sum over none has no gradient. Errors: those of all_reduce(); InvalidArgument on all ranks if
// a rank gives a negative number, or one that is not finite.
inline double token_scale(double tokens, const CollectiveOptions& options = {}, const Site& site = Site::current()) {
  const at::Tensor total = at::empty({2}, at::kDouble);
  auto* const values = total.mutable_data_ptr<double>();
  const bool counts = tokens >= 0 && std::isfinite(tokens);
  values[0] = counts ? tokens : 0;
  values[1] = counts ? 0 : 1;
  const Group group = options.group.resolved();
  all_reduce(total, {.op = ReduceOp::SUM, .group = group, .timeout = options.timeout}, site);
  if (values[1] != 0)
    throw InvalidArgument("token_scale(): tokens: expected a finite number of 0 or more on each rank, got " +
                          std::to_string(tokens) + " on this rank");
  return values[0] > 0 ? group.size() / values[0] : 0;
}

}  // namespace muster
