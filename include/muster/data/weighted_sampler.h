// DistributedWeightedSampler: draws samples with probabilities in proportion to weights, for example to see rare
// classes more often.
//
//   std::vector<double> weights = …;               // one for each sample of the dataset
//   muster::DistributedWeightedSampler sampler(weights);
//   auto loader = torch::data::make_data_loader(dataset, sampler, 64);
//
// In each epoch all ranks draw the same `num_samples` indices, and rank r takes places r, r + replicas, … of them. The
// draw is exactly Python's: torch.multinomial(weights, num_samples, replacement) of float64 weights with a generator
// seeded with seed + epoch, as WeightedRandomSampler does. If num_samples is not a multiple of the number of ranks, the
// draw is padded from its start, or cut with drop_last, or split unequally with `.pad = false`.
//
// epoch_sampler.h says what set_epoch(), seek(), save() and load() do, and which threads may call them. load() compares
// a hash of the weights.
// Source: torch.utils.data.WeightedRandomSampler.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "muster/data/epoch_sampler.h"

namespace muster {

struct DistributedWeightedSamplerOptions {
  std::optional<int> num_replicas;    // default: world size of the calling thread's World
  std::optional<int> rank;            // default: rank in that World; if both are given, no World is needed
  std::optional<size_t> num_samples;  // draws in an epoch, of all ranks together; default: the number of weights
  bool replacement = true;            // false: draw a sample at most once in an epoch
  uint64_t seed = 0;                  // must be the same on all ranks
  bool drop_last = false;             // drop the last num_samples % num_replicas draws instead of padding
  bool pad = true;                    // false: neither repeat nor drop a draw
};

class DistributedWeightedSampler final : public EpochSampler {
 public:
  // `weights`: one for each sample, at most 2^24; finite, at least 0, in any scale. The tensor has one dimension and
  // any real dtype; it is copied. No weights give an empty sampler. Errors: InvalidArgument (other weights; a sum that
  // is 0 or overflows; num_samples above the number of positive weights without replacement; the ranks as for
  // DistributedSampler); Aborted if a World is needed and the calling thread has none.
  explicit DistributedWeightedSampler(const std::vector<double>& weights,
                                      const DistributedWeightedSamplerOptions& options = {});
  explicit DistributedWeightedSampler(const at::Tensor& weights, const DistributedWeightedSamplerOptions& options = {});
};

}  // namespace muster
