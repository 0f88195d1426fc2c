// DistributedSampler: which samples of a dataset this rank works on.
//
//   muster::DistributedSampler sampler(dataset.size());
//   auto loader = torch::data::make_data_loader(dataset, sampler, 64);
//   for (int epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);                       // another order each epoch, the same on all ranks
//     for (auto& batch : *loader) { … }
//   }
//
// All ranks draw the same order of all samples, and rank r takes places r, r + replicas, r + 2 replicas …  The order is
// exactly Python's: torch.randperm(size) with a generator seeded with seed + epoch. So that all ranks make the same
// number of steps, the order is *padded* from its start (several times if there are fewer samples than replicas), or
// cut if drop_last is set. An evaluation needs neither: with `.pad = false` each sample is used exactly once over all
// ranks, and the ranks' numbers of samples differ by at most one.
//
//   muster::DistributedSampler test_sampler(test.size(), {.shuffle = false, .pad = false});
//
// epoch_sampler.h says what set_epoch(), seek(), save() and load() do, and which threads may call them.
// Source: torch.utils.data.distributed.DistributedSampler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "muster/data/epoch_sampler.h"

namespace muster {

struct DistributedSamplerOptions {
  std::optional<int> num_replicas;  // default: world size of the calling thread's World
  std::optional<int> rank;          // default: rank in that World; if both are given, no World is needed
  bool shuffle = true;
  uint64_t seed = 0;       // must be the same on all ranks
  bool drop_last = false;  // drop the last size % num_replicas samples instead of padding
  bool pad = true;         // false: neither repeat nor drop a sample
};

class DistributedSampler final : public EpochSampler {
 public:
  // `size`: number of samples in the dataset; 0 gives an empty sampler. Errors: InvalidArgument (num_replicas below 1,
  // a rank outside [0, num_replicas), drop_last together with pad = false); Aborted if a World is needed and the
  // calling thread has none.
  explicit DistributedSampler(size_t size, const DistributedSamplerOptions& options = {});
};

}  // namespace muster
